"""nano on the CPU: every drafter beside plain decoding, on prompts of our own in six manners; the texts must be the same.

    python benchmarks/nano_drafters.py --threads 2 --output benchmarks/runs/nano-drafters-cpu.json
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

from soloist import LLM, SamplingParams, __version__
from soloist.llm import Prompt

PROMPTS: dict[str, Prompt] = {
    "documentation": "PostgreSQL indexes can be",
    "code": "def read_lines(path):\n    ",
    "reference": "The function returns a new array",
    "maths": [{"role": "user", "content": "Ada has 17 apples and buys 25 more. How many apples does Ada have now?"}],
    "chat": [{"role": "user", "content": "What does the word 'harbour' mean?"}],
    "json": [{"role": "user", "content": "Give me a JSON object for Ken, 44 years old, a pilot from Oslo."}],
}
DRAFTERS: tuple[tuple[str, int | str], ...] = (
    ("ngram", "auto"), ("mtp", "auto"), ("mtp", 3), ("dspark", "auto"), ("dspark", 7)
)  # fmt: skip


def compare(drafted: LLM, params: SamplingParams, repeats: int) -> dict[str, Any]:
    """Plain and drafted runs alternate; the fastest of each prompt counts, and all of them are kept."""
    plain, rows = drafted.plain(), {}
    for name, prompt in PROMPTS.items():
        pairs = [(plain.generate(prompt, params), drafted.generate(prompt, params)) for _ in range(repeats)]
        assert all(a.token_ids == b.token_ids and a.text == b.text for a, b in pairs), f"another text: {name}"
        rows[name] = {
            "tokens": len(pairs[0][0].token_ids),
            "plain_s": [a.timings.decode_s for a, _ in pairs],
            "drafted_s": [b.timings.decode_s for _, b in pairs],
            "acceptance_length": pairs[-1][1].timings.acceptance_length,
        }
    tokens = sum(row["tokens"] - 1 for row in rows.values())
    slow, quick = (sum(min(row[key]) for row in rows.values()) for key in ("plain_s", "drafted_s"))
    return {"plain_tok_s": tokens / slow, "drafted_tok_s": tokens / quick, "speedup": slow / quick, "prompts": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    params, results = SamplingParams(temperature=0, max_tokens=128), []
    for name, width in DRAFTERS:
        with LLM("nano", drafter=name, draft_width=width, threads=args.threads) as llm:
            found = {"drafter": name, "draft_width": width, **compare(llm, params, args.repeats), "plan": asdict(llm.plan)}
        results.append(found)
        print(f"{name} {width}: {found['plain_tok_s']:.1f} -> {found['drafted_tok_s']:.1f} tok/s, x{found['speedup']:.2f}")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    card = {"date": str(date.today()), "commit": commit, "soloist": __version__, "python": platform.python_version(),
            "torch": torch.__version__, "params": asdict(params), "results": results}  # fmt: skip
    for result in results:
        result["plan"]["model"] = "nano"
    args.output.write_text(json.dumps(card, indent=1) + "\n")


if __name__ == "__main__":
    main()
