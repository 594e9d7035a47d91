"""Prompt lookup against plain decoding on the CPU, on a prompt that repeats itself and on one where nothing does.

    python benchmarks/smollm2_ngram.py [--runs 5] [--threads N] [--output benchmarks/runs/smollm2-ngram-cpu.json]

Both engines share one loaded SmolLM2-135M. Runs alternate, plain and drafted, so that a machine that grows slower or
faster meets both alike. The texts must be the same. Exit code 1 if prompt lookup is below 1.5 times plain on the first
prompt, or below 0.98 times on the second.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from soloist import LLM, SamplingParams, __version__

COPY = """Repeat the following text exactly, word for word.

def area_of_circle(radius):
    if radius < 0:
        raise ValueError("radius must not be negative")
    return 3.14159 * radius * radius

def area_of_rectangle(width, height):
    if width < 0 or height < 0:
        raise ValueError("width and height must not be negative")
    return width * height

def area_of_triangle(base, height):
    if base < 0 or height < 0:
        raise ValueError("base and height must not be negative")
    return 0.5 * base * height
"""
STORY = "Write a story about a lighthouse keeper who finds something strange on the beach."

CASES: dict[str, tuple[str, SamplingParams, float]] = {
    "copy": (COPY, SamplingParams(temperature=0.0, max_tokens=192, ignore_eos=True), 1.5),
    "story": (STORY, SamplingParams(temperature=1.0, seed=1, max_tokens=192, ignore_eos=True), 0.98),
}
"""Prompt, request, and the least speed-up."""


def measure(llm: LLM, prompt: str, params: SamplingParams, runs: int) -> dict[str, Any]:
    """Alternate plain and drafted runs; speeds are tokens a second after the first token."""
    message = [{"role": "user", "content": prompt}]
    engines = {"plain": llm.plain(), "ngram": llm}
    for each in engines.values():
        each.generate(message, dataclasses.replace(params, max_tokens=16))
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    texts = set()
    for _ in range(runs):
        for name, each in engines.items():
            output = each.generate(message, params)
            texts.add(tuple(output.token_ids))
            samples[name].append(dataclasses.asdict(output.timings))
    speed = {name: statistics.median(1e3 / each["tpot_ms"] for each in taken) for name, taken in samples.items()}
    ratios = [
        a["tpot_ms"] / b["tpot_ms"] for a, b in zip(samples["plain"], samples["ngram"], strict=True)
    ]
    return {
        "same_text": len(texts) == 1,
        "tokens_per_second": speed,
        "speedup": statistics.median(ratios),
        "speedups": ratios,
        "samples": samples,
        "token_ids": list(texts.pop()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with LLM(args.model, drafter="ngram", device="cpu", threads=args.threads, prefix_cache_bytes=0) as llm:
        record: dict[str, Any] = {
            "soloist": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "plan": dataclasses.asdict(llm.plan),
            "cases": {},
        }
        good = True
        for name, (prompt, params, least) in CASES.items():
            found = measure(llm, prompt, params, args.runs)
            passed = found["same_text"] and found["speedup"] >= least
            record["cases"][name] = {"least": least, "passed": passed, "params": dataclasses.asdict(params), **found}
            good = good and passed
            plain, ngram = found["tokens_per_second"]["plain"], found["tokens_per_second"]["ngram"]
            print(
                f"{name}: plain {plain:.1f} tok/s, ngram {ngram:.1f} tok/s, {found['speedup']:.2f}x (least {least}x), "
                f"acceptance length {found['samples']['ngram'][-1]['acceptance_length']:.2f}, "
                f"{'same text' if found['same_text'] else 'DIFFERENT TEXT'}"
            )
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
