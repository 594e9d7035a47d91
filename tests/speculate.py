"""Engines over small random models with any drafter, and the plain answers to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from soloist.config import MAX_WINDOW, SamplingParams
from soloist.drafters.drafter import Drafter, NoDraft
from soloist.drafters.ngram import NgramDrafter
from soloist.drafters.scripted import ScriptedDrafter
from soloist.drafters.width import FixedWidth, WidthChoice
from soloist.runtime.engine import Engine, Request
from soloist.runtime.round import Parts
from soloist.runtime.runner import RoundResult
from soloist.state.buffers import Buffers
from soloist.state.sequence import Sequence as State
from soloist.testing.drafters import RandomDrafter, always_wrong, mixed, oracle
from tests import models

V, CONTEXT = 101, 256
PROMPT = tuple(models.ids(23).tolist())
PATTERN = (True, True, False, True, False, False, True, True, True, True, False)

Make = Callable[[Sequence[int], int], Drafter]
DRAFTERS: dict[str, Make] = {
    "ngram": lambda answer, width: NgramDrafter(width),
    "scripted": lambda answer, width: ScriptedDrafter(tuple(answer[:20]), width),
    "oracle": lambda answer, width: oracle(answer, width, V),
    "wrong": lambda answer, width: always_wrong(answer, width, V),
    "mixed": lambda answer, width: mixed(answer, PATTERN, width, V),
    "random": lambda answer, width: RandomDrafter(width, V),
}


def engine(
    kind: str, drafter: Drafter, widths: WidthChoice | None = None, rejection: bool = False, chunk: int = 512
) -> Engine:
    model = models.decoder(kind)
    state = State(model.cache_specs(), CONTEXT, MAX_WINDOW, torch.device("cpu"))
    bufs = Buffers(V, CONTEXT + MAX_WINDOW + 1, torch.device("cpu"))
    return Engine(Parts(model, state, bufs, drafter), V, chunk, widths or FixedWidth(drafter.width), rejection)


def run(
    served: Engine, params: SamplingParams, prompt: tuple[int, ...] = PROMPT, eos: tuple[int, ...] = ()
) -> list[RoundResult]:
    """The results of a request: the prefill's, then the rounds'."""
    return [result for result in served.run(Request(prompt, eos, params)) if result is not None]


def tokens(results: list[RoundResult]) -> list[int]:
    return [token for result in results for token in result.tokens]


@cache
def plain_engine(kind: str) -> Engine:
    return engine(kind, NoDraft())


def plain(kind: str, params: SamplingParams, prompt: tuple[int, ...] = PROMPT, eos: tuple[int, ...] = ()) -> list[int]:
    """What plain decoding answers."""
    return tokens(run(plain_engine(kind), params, prompt, eos))
