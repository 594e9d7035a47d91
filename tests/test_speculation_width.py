"""A round verifies as many of its drafts as it finds worth it, and the text does not depend on that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from soloist.config import MAX_WINDOW, SamplingParams
from soloist.drafters.drafter import Drafter, Draw, NoDraft
from soloist.models.decoder import Output
from soloist.ops.choose_width import choose_width
from soloist.ops.noise import mix
from soloist.runtime.round import draft, settle
from soloist.runtime.sampler import Sampler
from soloist.state.buffers import Buffers
from soloist.state.sequence import Window
from tests import models
from tests.speculate import DRAFTERS, PROMPT, Cheap, Driven, engine, plain, run, tokens

NAMES = ("ngram", "oracle", "mixed", "wrong")
ASKED = SamplingParams(temperature=0.7, seed=11, max_tokens=28)


class Moody:
    """A drafter that is sure of some first drafts and of no other, without reason: another number in every round."""

    def __init__(self, inner: Drafter):
        self.inner, self.name, self.width, self.taps, self.law = inner, inner.name, inner.width, inner.taps, None
        self.foresees, self.confidence = False, torch.ones(inner.width)
        self.bind, self.reset, self.observe = inner.bind, inner.reset, inner.observe

    def propose(self, bufs: Buffers, window: Window, draw: Draw) -> torch.Tensor:
        sure = mix(bufs.emitted) % (window.width + 1)
        self.confidence.copy_((torch.arange(self.width) < sure).float())
        return self.inner.propose(bufs, window, draw)


@pytest.mark.parametrize("name", NAMES)
def test_text_does_not_depend_on_how_much_a_round_verifies(name: str) -> None:
    answer = plain("llama", ASKED)
    results = run(engine("llama", Moody(DRAFTERS[name](answer, 9)), Cheap(9)), ASKED)
    assert tokens(results) == answer
    assert all(len(result.tokens) <= result.verified + 1 <= result.drafted + 1 for result in results)
    assert len({result.verified for result in results if result.drafted}) > 3


class Masked(Driven):
    """Rounds as a device runs them that nobody waits for: the whole window, with no states behind the rows that count."""

    def __init__(self, kind: str, answer: Sequence[int], width: int, forgets: bool = False):
        served = engine(kind, Moody(DRAFTERS["oracle"](answer, width)), Cheap(width))
        super().__init__(served, ASKED, PROMPT)
        served.parts.bufs.tell(*Cheap(width).tell())
        self.forgets = forgets

    @torch.inference_mode()
    def round(self, width: int) -> int:
        """Emit, with the rows that counted noted in `counted`."""
        parts = self.served.parts
        window, ids = draft(parts, self._sampler, int(parts.sequence.length) + width + 1, width)
        assert window.rows is not None and len(ids) == width + 1
        self.counted = int(window.rows)
        out = parts.model(ids, window, parts.sequence.caches, ())
        for cache in parts.sequence.recurrent:
            slots = (int(window.live) + 1 + torch.arange(self.counted, width + 1)) % len(cache.states)
            cache.states[slots] = float("nan")
        return self._take(settle(parts, self._sampler, out if not self.forgets else uncounted(out)))


def uncounted(out: Output) -> Output:
    return replace(out, window=replace(out.window, rows=None))


@pytest.mark.parametrize("kind", models.CONFIGS)
def test_rows_that_do_not_count_are_never_kept(kind: str) -> None:
    """All drafts are right, so exactly the rows that count are emitted; the states of the others are NaN."""
    answer = plain(kind, ASKED)
    driven, seen = Masked(kind, answer, 7), set()
    while len(driven.text) < len(PROMPT) + 20:
        assert driven.round(7) == driven.counted
        seen.add(driven.counted)
    assert driven.text[len(PROMPT) :] == answer[: len(driven.text) - len(PROMPT)]
    assert len(seen) > 2


def test_negative_control_keeping_what_does_not_count_spoils_the_text() -> None:
    answer = plain("ling-flash", ASKED)
    driven = Masked("ling-flash", answer, 7, forgets=True)
    while len(driven.text) < len(PROMPT) + 20:
        driven.round(7)
    assert driven.text[len(PROMPT) :][:20] != answer[:20]


def test_everything_is_verified_until_the_device_was_told_what_it_costs() -> None:
    bufs = Buffers(5, 8, torch.device("cpu"))
    for width in range(1, MAX_WINDOW):
        assert int(choose_width(torch.zeros(15), bufs.factors, bufs.costs, bufs.saved, width)) == width + 1


def test_what_the_device_is_told_stays_where_a_captured_round_finds_it() -> None:
    bufs = Buffers(5, 8, torch.device("cpu"))
    places = [bufs.costs.data_ptr(), bufs.factors.data_ptr(), bufs.saved.data_ptr()]
    bufs.tell([1.0, 2.0, 4.0], [0.9, 0.8], 0.5)
    assert [bufs.costs.data_ptr(), bufs.factors.data_ptr(), bufs.saved.data_ptr()] == places
    assert bufs.costs[:3].tolist() == [1, 2, 4] and bufs.costs[3:].unique().tolist() == [4]
    assert bufs.factors.tolist() == pytest.approx([0.9, 0.8, *[1.0] * 13]) and bufs.saved.tolist() == [0.5]


def test_the_choice_is_the_best_prefix_by_hand() -> None:
    def chosen(chances: list[float], costs: list[float], saved: float = 1.0, factor: float = 1.0) -> int:
        K = len(chances)
        given: Any = (torch.tensor(chances), torch.full((K,), factor), torch.tensor(costs), torch.tensor([saved]), K)
        return int(choose_width(*given)) - 1

    assert chosen([0.9, 0.1], [1.0, 1.2, 1.4]) == 1  # 1, 1.9 / 1.2, 1.99 / 1.4
    assert chosen([0.1, 0.9], [1.0, 1.2, 1.4]) == 0  # 1, 1.1 / 1.2, 1.19 / 1.4
    assert chosen([0.1, 0.9], [1.0, 1.2, 1.4], saved=0.0) == 2
    assert chosen([0.1, 0.9], [1.0, 1.2, 1.4], factor=9.0) == 2
    assert chosen([0.0, 0.0], [1.0, 1.0, 1.0]) == 2, "of equal ones the most"


def test_what_a_grammar_forces_is_certain() -> None:
    served = engine("llama", NoDraft())
    asked = SamplingParams(temperature=0.0, response_format={"type": "regex", "regex": "a+"})
    sampler, bufs = Sampler(asked, served.parts.bufs), served.parts.bufs
    bufs.forced.fill_(-1)
    bufs.forced[4:6] = 3
    assert sampler.sure(torch.full((15,), 0.5), torch.tensor([4, 5, 6])).tolist() == [1.0, 1.0, 0.5]
