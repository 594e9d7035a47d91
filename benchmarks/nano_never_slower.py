"""What a drafter costs where it does not pay: nano with draft_width=auto beside plain decoding, on the CPU.

    python benchmarks/nano_never_slower.py [--drafter ngram] [--output benchmarks/runs/nano-never-slower-cpu.json]

Two engines in one process answer the same request, a slice of tokens in turn, so a machine that grows slower or faster
meets both alike; which of them begins alternates too. The prompts are the held-out ones of `nano_held_out.py`, a case each
domain, answered greedily, and two that leave nothing to gain: tokens at random and a sentence, continued at temperature 1.
A pair of slices with one that took more than 1.5 times the case's median plain one had the machine taken away from it and
is left out; a trial of drafts costs far less than that. The texts must be the same. Exit code 1 if decoding a case is less than
0.98 times as fast as plain. With --output, cases of drafters that are not measured now stay in the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from soloist import LLM, SamplingParams, __version__
from soloist.bench.machine import read_machine
from soloist.llm import Output, StreamEvent

DRAFTERS = ("ngram", "mtp", "dspark")
SLICE, LEAST, TAKEN_AWAY = 16, 0.98, 1.5

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
    return domains | {"random": (noise * 3, sampled), "sentence": (sentence * 3, sampled)}


class Answer:
    """A request that is served a slice at a time."""

    def __init__(self, llm: LLM, prompt: Prompt, params: SamplingParams):
        self._events: Iterator[StreamEvent] = llm.stream(prompt, params)
        self.token_ids: list[int] = []
        self.output: Output | None = None
        self._next()

    def _next(self) -> None:
        event = next(self._events)
        self.token_ids += event.token_ids
        self.output = event.output

    def slice(self, end: int) -> float:
        """Go on until so many tokens are there, or the answer ends: milliseconds a token, 0 where it had ended."""
        begin, begun = len(self.token_ids), time.perf_counter()
        while self.output is None and len(self.token_ids) < end:
            self._next()
        ms = (time.perf_counter() - begun) * 1e3
        return ms / (len(self.token_ids) - begin) if len(self.token_ids) > begin else 0.0

    def finish(self) -> Output:
        """Frees the engine for the next request."""
        while self.output is None:
            self._next()
        for _ in self._events:
            pass
        return self.output


def measure(plain: LLM, drafted: LLM, case: Case) -> dict[str, Any]:
    """Both engines in turn over all prompts of a case."""
    prompts, params = case
    for llm in (plain, drafted):
        llm.generate(prompts[0], dataclasses.replace(params, max_tokens=SLICE))
    slices, same, timings = list[tuple[float, float]](), True, list[Any]()
    for place, prompt in enumerate(prompts):
        answers = [Answer(plain, prompt, params), Answer(drafted, prompt, params)]
        ends = range(1 + SLICE, (params.max_tokens or 0) + 1, SLICE)
        for end in ends:
            order = answers if (place + end // SLICE) % 2 else answers[::-1]
            taken = {id(answer): answer.slice(end) for answer in order}
            slices.append((taken[id(answers[0])], taken[id(answers[1])]))
        outputs = [answer.finish() for answer in answers]
        timings.append(dataclasses.asdict(outputs[1].timings))
        same = same and answers[0].token_ids == answers[1].token_ids
    ran = [(a, b) for a, b in slices if a and b]
    most = TAKEN_AWAY * statistics.median(a for a, _ in ran)
    kept = [(a, b) for a, b in ran if max(a, b) <= most]
    plain_ms, drafted_ms = (statistics.fmean(side) for side in zip(*kept, strict=True))
    return {
        "same_text": same,
        "plain_ms": plain_ms,
        "drafted_ms": drafted_ms,
        "speedup": plain_ms / drafted_ms,
        "num_slices": len(ran),
        "slices": kept,
        "timings": timings,
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
                        f"{drafter:6} {name:8} {measured['plain_ms']:.2f} ms a token, drafted {measured['drafted_ms']:.2f}: "
                        f"{measured['speedup']:.3f}x, {len(measured['slices'])} of {measured['num_slices']} slices, "
                        f"{'same text' if measured['same_text'] else 'DIFFERENT TEXT'}",
                        flush=True,
                    )
    if args.output is not None:
        before = json.loads(args.output.read_text())["cases"] if args.output.exists() else []
        kept = [case for case in before if case["drafter"] not in drafters]
        record = {"soloist": __version__, "least": LEAST, "machine": machine, "cases": kept + found}
        args.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(case["passed"] for case in found) else 1


if __name__ == "__main__":
    sys.exit(main())
