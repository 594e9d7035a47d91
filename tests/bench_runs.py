"""Synthetic records, runs and targets with known times, shared by the tests of `soloist bench`."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from typing import Any

from soloist.bench.prepare import Bench, with_prompts
from soloist.bench.records import SCHEMA_VERSION, Card, Machine, RequestRecord, RunFile, Variant, Workload
from soloist.bench.summarise import summarise_run, verdicts_of
from soloist.bench.target import Ending, Event, Prompt

WORKLOAD = Workload("chat", "random", 8, 16, input_tokens=5)
CARD = Card("test", "nowhere", (WORKLOAD,), (Variant("plain"), Variant("other", "ngram", acceptance="real")))
MACHINE = Machine("Linux", "cpu", 2, 2, None, 1 << 30, (), (), (), {"torch": "2.13.0"}, "abc", False)


def record(prompt: int = 0, repeat: int = 0, tpot_ms: float = 10.0, **changes: Any) -> RequestRecord:
    """Sixteen tokens after a first one at 50 ms, one a round."""
    last = 50.0 + 15 * tpot_ms
    made = RequestRecord(
        variant="plain", workload="chat", domain="chat", prompt=prompt, repeat=repeat, at_s=float(prompt + 100 * repeat),
        prompt_tokens=5, output_tokens=16, count_source="engine", ttft_ms=50.0, first_tokens=1, last_ms=last,
        first_text_ms=50.0, first_answer_ms=50.0, end_ms=last, rounds=15, drafted=0, accepted=0, finish_reason="length",
        text_same=True,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def noisy_run(seed: int, factor: float = 1.0, scatter: float = 0.02, repeats: int = 3, **changes: Any) -> RunFile:
    """A run of eight prompts whose TPOTs scatter around 10 ms times `factor`. changes: fields of RunFile."""
    return dataclasses.replace(run_of(noisy_requests(seed, factor, scatter, repeats)), **changes)


def noisy_requests(seed: int, factor: float = 1.0, scatter: float = 0.02, repeats: int = 3) -> tuple[RequestRecord, ...]:
    rng = random.Random(seed)
    return tuple(
        record(prompt, repeat, 10 * factor * (1 + 0.1 * prompt) * rng.gauss(1, scatter), variant=variant.name)
        for repeat in range(repeats) for prompt in range(8) for variant in CARD.variants
    )  # fmt: skip


def run_of(requests: tuple[RequestRecord, ...], card: Card = CARD) -> RunFile:
    return RunFile(
        schema_version=SCHEMA_VERSION, soloist="0", card=card, card_hash=card.hash(), command="", started="", duration_s=1.0,
        machine=MACHINE, conditions=(), plans={}, ops={}, read_rate=None, requests=requests,
        summaries=summarise_run(card, requests), verdicts=verdicts_of(card, requests), checks=(), flags=(), partial=False,
        passed=True,
    )  # fmt: skip


class Ids:
    """An Encoder without text."""

    vocab_size, special_ids, has_text, has_chat = 50, (0, 1), False, False

    def encode(self, prompt: object) -> list[int]:
        raise AssertionError("there is no text")


class Clockwork:
    """A Target whose answers are known. ids: what it emits, by prompt; ends: called before every request."""

    name = "in-process"

    def __init__(self, step_ms: float, wrong_after: int | None = None):
        self.step_ms, self.wrong_after, self.served, self.interrupt_at = step_ms, wrong_after, list[str](), -1

    def serve(self, prompt: Prompt, sampling: Mapping[str, Any]) -> Iterator[Event]:
        if len(self.served) == self.interrupt_at:
            raise KeyboardInterrupt
        self.served.append(prompt.name)
        assert prompt.token_ids is not None
        for i in range(sampling["max_tokens"]):
            token = (sum(prompt.token_ids) + i) % 50
            if self.wrong_after is not None and i >= self.wrong_after:
                token = 49 - token
            last = i == sampling["max_tokens"] - 1
            ending = Ending("length", len(prompt.token_ids), i + 1, "engine", 0, 0) if last else None
            yield Event(50 + i * self.step_ms, (token,), 1, "", False, 0, 0, self.step_ms, None, ending)

    def plan(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


def clockwork_bench(*targets: Clockwork, card: Card = CARD) -> Bench:
    """A Bench of the card's variants in order."""
    card, prompts = with_prompts(card, Ids())
    named = {variant.name: target for variant, target in zip(card.variants, targets, strict=True)}
    return Bench(card, named, prompts, MACHINE, None, None, lambda: None)  # type: ignore[arg-type]
