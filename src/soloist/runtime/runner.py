"""Runners repeat the round. A runner launches rounds and hands their results to the host, in order.

`lookahead` says how many rounds may be launched before the oldest is read: 0 where the host computes the round itself,
1 where a device runs it meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from soloist.ops.accept import RUNNING
from soloist.runtime.round import Follow, Parts, RoundOutput, decode_round
from soloist.runtime.sampler import Sampler


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of the model's probabilities at one token: its own, and the best alternatives' by id."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True)
class RoundResult:
    """A round on the host. tokens: what was emitted, in order; drafted: how many tokens were proposed; verified: how many of
    them counted; done: see ops/accept; ms: how long the round took; confidence: the drafter's after it.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    drafted: int
    verified: int
    done: int
    ms: float
    confidence: list[float] | None

    @property
    def running(self) -> bool:
        return self.done == RUNNING


class Runner(Protocol):
    """num_prepared: how often a round took longer because its kind was new and was compiled or captured."""

    lookahead: int

    @property
    def num_prepared(self) -> int: ...

    def launch(self, sampler: Sampler, bound: int, width: int, follow: Follow | None = None) -> None:
        """Start the next round; `bound`, `width` and `follow` as in `decode_round`."""
        ...

    def read(self) -> RoundResult:
        """The oldest round launched and not yet read; waits for it."""
        ...

    def drop(self) -> None:
        """Forget the rounds that were not read."""
        ...


class EagerRunner:
    """Runs the round as it is written, op by op."""

    lookahead = 0
    num_prepared = 0

    def __init__(self, parts: Parts):
        self.parts = parts
        self._results: deque[RoundResult] = deque()

    def launch(self, sampler: Sampler, bound: int, width: int, follow: Follow | None = None) -> None:
        begun = time.perf_counter()
        self._results.append(to_host(decode_round(self.parts, sampler, bound, width, follow), width, begun))

    def read(self) -> RoundResult:
        return self._results.popleft()

    def drop(self) -> None:
        self._results.clear()


def to_host(output: RoundOutput, drafted: int, begun: float) -> RoundResult:
    """Copy a round's result to the host. Waits for the device; the round takes from `begun` on the clock until then."""
    n_host, done, rows, *picks = output.report.tolist()
    tokens, logprobs = picks[:n_host], None
    if output.logprobs is not None:
        told = zip(tokens, *(values.tolist() for values in output.logprobs), strict=False)
        logprobs = [
            TokenLogprobs(token, own, dict(zip(ids, values, strict=True))) for token, own, ids, values in told
        ]
    confidence = None if output.confidence is None else output.confidence.tolist()
    return RoundResult(tokens, logprobs, drafted, rows - 1, done, (time.perf_counter() - begun) * 1e3, confidence)
