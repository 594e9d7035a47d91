"""What a drafter costs where it does not pay: nano with draft_width=auto beside plain decoding, on the CPU.

    python benchmarks/nano_never_slower.py [--drafter ngram] [--output benchmarks/runs/nano-never-slower-cpu.json]

Two engines in one process answer the same request, a round in turn. A bound of 2 % is finer than a shared machine is steady:
a plain round may take 15 ms now and 25 ms a minute later. So every round of the drafting engine is set against the median of
the plain engine's rounds around it, eight in all. Of its rounds that draft nothing the median of these ratios counts, of the
few others the mean; together they say how many plain rounds a token took. The wall clock's own answer stands beside it.

The prompts are the held-out ones of `nano_held_out.py`, a case each domain, answered greedily, and two that leave nothing to
gain: tokens at random and a sentence, continued at temperature 1. The texts must be the same. Exit code 1 if decoding a case is
less than 0.98 times as fast as plain. With --output, cases of drafters that are not measured now stay in the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from soloist import LLM, SamplingParams, __version__
from soloist.bench.machine import read_machine
from soloist.llm import StreamEvent

DRAFTERS = ("ngram", "mtp", "dspark")
LEAST, AROUND = 0.98, 4

Prompt = str | list[int]
Case = tuple[list[Prompt], SamplingParams]


def cases(per_domain: int) -> dict[str, Case]:
    """Prompts, and how each of them is answered."""
    held_out: dict[str, list[Prompt]] = defaultdict(list)
    for line in (Path(__file__).parent / "nano_held_out.jsonl").read_text().splitlines():
        row = json.loads(line)
        held_out[row["domain"]].append(row["token_ids"])
    greedy = SamplingParams(temperature=0.0, max_tokens=97)
    sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=161, ignore_eos=True)
    noise: list[Prompt] = [[random.Random(place).randrange(10, 3000) for place in range(64)]]
    sentence: list[Prompt] = ["The lighthouse keeper walked down to the beach and found"]
    domains: dict[str, Case] = {domain: (held_out[domain][:per_domain], greedy) for domain in sorted(held_out)}
    return domains | {"random": (noise * 2, sampled), "sentence": (sentence * 2, sampled)}


@dataclasses.dataclass(frozen=True)
class Round:
    """drafted: by how many tokens the window was wider than a plain one; tokens: emitted; ms: on the wall's clock."""

    drafted: int
    tokens: int
    ms: float


class Answer:
    """A request that is served a round at a time."""

    def __init__(self, llm: LLM, prompt: Prompt, params: SamplingParams):
        self._events: Iterator[StreamEvent] = llm.stream(prompt, params)
        self.token_ids: list[int] = []
        self.done = False
        self.step()

    def step(self) -> Round:
        """The next round; after the last one the engine is free for the next request."""
        begun = time.perf_counter()
        event = next(self._events)
        ms = (time.perf_counter() - begun) * 1e3
        self.token_ids += event.token_ids
        self.done = event.output is not None
        for _ in self._events if self.done else ():
            pass
        return Round(event.drafted, len(event.token_ids), ms)


def in_turn(plain: Answer, drafted: Answer) -> Iterator[tuple[Round, float]]:
    """Every round of the drafting engine with the duration of a plain one at that time."""
    plain_ms: list[float] = []
    found: list[tuple[Round, int]] = []
    while not (plain.done and drafted.done):
        if not drafted.done and (plain.done or len(drafted.token_ids) <= len(plain.token_ids)):
            found.append((drafted.step(), len(plain_ms)))
        else:
            plain_ms.append(plain.step().ms)
    for each, place in found:
        yield each, statistics.median(plain_ms[max(0, min(place, len(plain_ms) - AROUND) - AROUND) :][: 2 * AROUND])


def measure(plain: LLM, drafted: LLM, case: Case) -> dict[str, Any]:
    """Both engines in turn over all prompts of a case."""
    prompts, params = case
    for llm in (plain, drafted):
        llm.generate(prompts[0], dataclasses.replace(params, max_tokens=8))
    rounds, same = list[tuple[Round, float]](), True
    for prompt in prompts:
        answers = Answer(plain, prompt, params), Answer(drafted, prompt, params)
        rounds += in_turn(*answers)
        same = same and answers[0].token_ids == answers[1].token_ids
    ratios: dict[bool, list[float]] = defaultdict(list)
    for each, plain_ms in rounds:
        ratios[each.drafted > 0].append(each.ms / plain_ms)
    tokens = sum(each.tokens for each, _ in rounds)
    idle = statistics.median(ratios[False]) if ratios[False] else 1.0
    spent = idle * len(ratios[False]) + sum(ratios[True])
    return {
        "same_text": same,
        "prompts": len(prompts),
        "tokens": tokens,
        "speedup": tokens / spent,
        "idle_round": idle,
        "speedup_by_the_clock": tokens * statistics.fmean(ms for _, ms in rounds) / sum(each.ms for each, _ in rounds),
        "drafted": Counter(each.drafted for each, _ in rounds),
        "rounds": [(each.drafted, each.tokens, round(each.ms, 3), round(ms, 3)) for each, ms in rounds],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", choices=DRAFTERS, action="append", help="all of them unless given")
    parser.add_argument("--prompts", type=int, default=6, help="a domain")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    settings: dict[str, Any] = {"device": "cpu", "threads": args.threads, "context_length": 512, "prefix_cache_bytes": 0}
    machine, drafters, found = dataclasses.asdict(read_machine(args.threads)), args.drafter or DRAFTERS, list[Any]()
    with LLM("nano", **settings) as plain:
        for drafter in drafters:
            with LLM("nano", drafter=drafter, draft_width="auto", **settings) as drafted:
                for name, case in cases(args.prompts).items():
                    measured = measure(plain, drafted, case)
                    passed = measured["same_text"] and measured["speedup"] >= LEAST
                    found.append({"drafter": drafter, "case": name, "passed": passed, **measured})
                    print(
                        f"{drafter:6} {name:8} {measured['speedup']:.3f}x ({measured['speedup_by_the_clock']:.3f} by the clock), "
                        f"a round that drafts nothing {measured['idle_round']:.3f} plain ones, {measured['tokens']} tokens, "
                        f"drafted {dict(sorted(measured['drafted'].items()))}, "
                        f"{'same text' if measured['same_text'] else 'DIFFERENT TEXT'}",
                        flush=True,
                    )
    if args.output is not None:
        before = json.loads(args.output.read_text())["cases"] if args.output.exists() else []
        kept = [case for case in before if case["drafter"] not in drafters]
        record = {"soloist": __version__, "least": LEAST, "machine": machine, "cases": kept + found}
        args.output.write_text(json.dumps(record) + "\n")
    return 0 if all(case["passed"] for case in found) else 1


if __name__ == "__main__":
    sys.exit(main())
