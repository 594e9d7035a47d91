"""nano on held-out prompts: plain beside n-gram, NEXTN and DSpark on the CPU with two threads, the texts compared.

    python benchmarks/nano_held_out.py [--output benchmarks/runs/nano-held-out-cpu.json] [--set KEY=VALUE]
    python benchmarks/nano_held_out.py --make runs/work      # draw the prompts anew, after train nano built its corpus

Run it from the repository's root on a machine that does nothing else. The prompts are beginnings of pages and
conversations that the corpus held out by the hash of their text, twelve a domain, each with its source and licence. Exit
code 1 if a text differs, or if the better of NEXTN and DSpark decodes fewer than 1.3 times the tokens per second of plain.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from pathlib import Path

from tokenizers import Tokenizer

from soloist.bench.card import load_card
from soloist.bench.records import RequestRecord, RunFile
from soloist.bench.run import run_card
from soloist.bench.table import run_lines
from soloist.train.corpus import Page, read_pages
from soloist.train.sources import licence_of

HERE = Path(__file__).parent
LEAST, PER_DOMAIN = 1.3, 12
SHORTEST, LONGEST, LEFT = 16, 96, 48
"""Tokens of a prompt cut from a page, and what the page must go on for behind it."""


def cut(tokenizer: Tokenizer, page: Page, rng: random.Random) -> list[int] | None:
    """The beginning of a page, a conversation up to its first answer; None where it is too long or too short."""
    ids: list[int] = tokenizer.encode(page.text).ids
    if page.domain not in ("docs", "code"):
        end = ids.index(tokenizer.token_to_id("</think>")) + 1
        return ids[:end] if end <= LONGEST else None
    most = min(LONGEST, len(ids) - LEFT)
    return ids[: rng.randint(SHORTEST, most)] if most >= SHORTEST else None


def make(work: Path) -> None:
    """Write the prompts beside this file."""
    tokenizer = Tokenizer.from_file(str(work / "tokenizer" / "tokenizer.json"))
    pages = [page for page in read_pages(work / "heldout.jsonl") if page.source != "swi-prolog-doc"]
    rng, lines = random.Random(0), []
    rng.shuffle(pages)
    found: dict[str, list[dict[str, object]]] = defaultdict(list)
    for page in pages:
        ids = cut(tokenizer, page, rng) if len(found[page.domain]) < PER_DOMAIN else None
        if ids is not None:
            row = {"domain": page.domain, "source": page.source, "licence": licence_of(page.source), "token_ids": ids}
            found[page.domain].append(row)
    for domain in sorted(found):
        lines += [json.dumps(row) for row in found[domain]]
    (HERE / "nano_held_out.jsonl").write_text("\n".join(lines) + "\n")


def rate(requests: list[RequestRecord]) -> float:
    """Tokens a second after the first, over all requests."""
    measured = [r for r in requests if r.output_tokens and r.first_tokens and r.last_ms and r.ttft_ms]
    tokens = sum(r.output_tokens - r.first_tokens for r in measured)
    return 1e3 * tokens / sum(r.last_ms - r.ttft_ms for r in measured)


def verdict(run: RunFile) -> tuple[str, bool]:
    """A line for each domain and one for all, and whether the better of NEXTN and DSpark is good enough."""
    lines, good = [], False
    domains = sorted({r.domain for r in run.requests})
    for domain in [*domains, "all"]:
        by_variant: dict[str, list[RequestRecord]] = defaultdict(list)
        for r in run.requests:
            if domain in (r.domain, "all"):
                by_variant[r.variant].append(r)
        rates = {variant: rate(requests) for variant, requests in by_variant.items()}
        shown = "  ".join(f"{name} x{speed / rates['plain']:.2f}" for name, speed in rates.items() if name != "plain")
        lines.append(f"  {domain:6} plain {rates['plain']:.1f} tok/s  {shown}")
        if domain == "all":
            better = max(("NEXTN", "DSpark"), key=rates.__getitem__)
            factor = rates[better] / rates["plain"]
            good = run.passed and factor >= LEAST
            lines.append(f"{better} x{factor:.2f}, at least x{LEAST} asked: {'passed' if good else 'FAILED'}")
    return "\n".join(lines), good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("nano-held-out-cpu.json"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    parser.add_argument("--make", type=Path, metavar="WORK", help="folder of the corpus")
    args = parser.parse_args()
    if args.make is not None:
        make(args.make)
        return 0
    run = run_card(load_card(str(HERE / "nano_held_out.toml"), args.changes), args.output, " ".join(sys.argv), progress=True)
    print("\n".join(run_lines(run)))
    text, good = verdict(run)
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
