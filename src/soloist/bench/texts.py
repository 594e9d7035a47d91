"""Correctness in the same run: what plain decoding would have written, and whether state leaks between requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from soloist.bench.recording import Answer, Place, record_events
from soloist.bench.records import UNKNOWN, Card, Check, RequestRecord, Variant, Workload
from soloist.bench.target import Prompt, Target

if TYPE_CHECKING:
    from soloist.llm import LLM

GATE_TOKENS, SAMPLED_REQUESTS = 32, 2
"""Length of the greedy answer that is repeated after so many sampled requests."""
LOGIT_TOKENS = 256
"""Most tokens whose logits are looked at: all of them may not fit into memory at once."""
ELSEWHERE = Place("", "", "", 0, 0, 0.0)


class Reference:
    """The texts that the answers must equal.

    In process they come from plain decoding with the same engine settings: the plain variant's first answer where the
    card has one, otherwise a request of its own, unmeasured. Behind a server they come from `reference`, a model loaded
    here, if there is one, otherwise from the first answer to the same prompt, which finds only that a server differs
    from itself. Where a server tells no ids, both texts are cut into ids here; the model may have cut its own otherwise.
    """

    def __init__(self, reference: LLM | None = None):
        self._reference = reference
        self._texts: dict[tuple[str, str, int], tuple[int, ...]] = {}

    def judge(
        self, answer: Answer, variant: Variant, target: Target, prompt: Prompt, sampling: Mapping[str, Any]
    ) -> RequestRecord:
        """The record, with text_same and first_difference where ids are known."""
        record, ids = answer.record, answer.token_ids
        if ids is None and self._reference is not None and self._reference.tokenizer is not None:
            ids = self._cut(answer.text)
        if record.error is not None or ids is None or variant.settings.get("acceptance") == "rejection":
            return record
        settings = repr(sorted(variant.settings.items()))
        key = (settings, record.workload, record.prompt)
        if key not in self._texts:
            self._texts[key] = self._expected(answer, ids, variant, target, prompt, sampling)
        expected = self._texts[key]
        same = ids == expected
        pairs = enumerate(zip(ids, expected, strict=False))
        shortest = min(len(ids), len(expected))
        first = None if same else next((i for i, (a, b) in pairs if a != b), shortest)
        record = dataclasses.replace(record, text_same=same, first_difference=first)
        if self._reference is not None and not sampling.get("temperature") and not same:
            return self._bounded(record, prompt, ids)
        return record

    def _cut(self, text: str) -> tuple[int, ...]:
        assert self._reference is not None and self._reference.tokenizer is not None
        return tuple(self._reference.tokenizer.encode(text, add_special=False))

    def _expected(
        self,
        answer: Answer,
        ids: tuple[int, ...],
        variant: Variant,
        target: Target,
        prompt: Prompt,
        sampling: Mapping[str, Any],
    ) -> tuple[int, ...]:
        from soloist.bench.inprocess import InProcess
        from soloist.config import SamplingParams

        model = self._reference
        if model is None and isinstance(target, InProcess) and variant.acceptance != "off":
            model = target.plain
        if model is None:
            return ids

        assert prompt.token_ids is not None, prompt.name
        output = model.generate(prompt.token_ids, SamplingParams(**sampling))
        return tuple(output.token_ids) if answer.token_ids is not None else self._cut(output.text)

    def _bounded(self, record: RequestRecord, prompt: Prompt, ids: tuple[int, ...]) -> RequestRecord:
        """A foreign engine rounds otherwise: near ties may fall otherwise, and the text after them is another.

        It passes if no token that it chose is further below the likeliest one than REGRET.
        """
        assert self._reference is not None and prompt.token_ids is not None
        found = regret(self._reference, prompt.token_ids, ids)
        return dataclasses.replace(record, regret=found, text_same=found <= REGRET)


REGRET = 0.1
"""Nats. bfloat16 rounds logits of 16 to 32 to 0.125, and a wrong kernel is off by whole nats."""


def regret(llm: LLM, prompt: Sequence[int], output: Sequence[int]) -> float:
    """Of greedy decoding: how far, at worst, an emitted token lies below the likeliest one, in nats, by our logits."""
    logits = llm.logits([*prompt, *output])[len(prompt) - 1 : -1]
    own = logits.gather(1, logits.new_tensor(list(output)).long()[:, None])[:, 0]
    return float((logits.amax(1) - own).max())


def greedy_after_sampled(
    target: Target, variant: Variant, workload: Workload, prompt: Prompt, sampling: Mapping[str, Any]
) -> Check:
    """Greedy, then sampled requests, then greedy again: the two greedy answers must be one."""
    greedy = {**sampling, "temperature": 0.0, "max_tokens": min(GATE_TOKENS, workload.output_tokens)}
    answers = [record_events(target.serve(prompt, greedy), ELSEWHERE)]
    for seed in range(1, SAMPLED_REQUESTS + 1):
        record_events(target.serve(prompt, {**greedy, "temperature": 1.0, "seed": seed}), ELSEWHERE)
    answers.append(record_events(target.serve(prompt, greedy), ELSEWHERE))
    first, last = ((a.token_ids, a.text) for a in answers)
    broken = next((a.record.error for a in answers if a.record.error), None)
    name = "greedy text is the same after sampled requests"
    return Check(name, variant.name, workload.name, None if broken else first == last, broken or "")


def finite_logits(llm: LLM, variant: Variant, workload: Workload, prompt: Prompt) -> Check:
    """Of the prompt's beginning and what the model writes after it."""
    from soloist.config import SamplingParams

    room = min(llm.plan.context_length, LOGIT_TOKENS)
    written = min(GATE_TOKENS, room - 1)
    ids = list(prompt.token_ids or ())[: room - written]
    ids += llm.generate(ids, SamplingParams(temperature=0.0, max_tokens=written)).token_ids
    logits = llm.logits(ids)
    return Check("logits are finite", variant.name, workload.name, bool(logits.isfinite().all()), f"{len(ids)} tokens")


TEXT_CHECKS = OF_ITSELF, OF_PLAIN = "the server repeats itself", "text is that of plain decoding"


def text_checks(card: Card, requests: Sequence[RequestRecord]) -> list[Check]:
    """One for every variant and workload, from the records. Behind a server the weights are known if its text was compared
    with ours.
    """
    name = OF_ITSELF if card.target == "http" and card.weights == UNKNOWN else OF_PLAIN
    found = []
    for workload in card.workloads:
        for variant in card.variants:
            own = [r for r in requests if (r.workload, r.variant) == (workload.name, variant.name)]
            judged = [r for r in own if r.text_same is not None]
            wrong = [r for r in judged if not r.text_same]
            detail = f"{len(judged) - len(wrong)} of {len(judged)} answers"
            if wrong:
                worst = wrong[0]
                detail += f"; prompt {worst.prompt} differs from token {worst.first_difference} on"
            if own:
                found.append(Check(name, variant.name, workload.name, not wrong if judged else None, detail))
    return found
