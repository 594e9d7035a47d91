"""Rounds as CUDA graphs: one for every width and kind of request, captured once, launched without looking back.

The host launches round r + 1 before it reads round r; what it reads was copied to pinned memory behind each launch.
A round that meets a new kind of request runs op by op the first time, which compiles what it needs, and is captured for
the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from soloist.runtime.round import Follow, Parts, RoundOutput, decode_round
from soloist.runtime.runner import RoundResult, to_host
from soloist.runtime.sampler import Sampler

SHORTEST_BOUND = 2048
"""Graphs are captured for contexts of this many positions and its doublings; a text does not depend on it."""

Key = tuple[object, ...]


@dataclass(frozen=True)
class Captured:
    """A graph and what it leaves behind on the device."""

    graph: torch.cuda.CUDAGraph
    output: RoundOutput


@dataclass(frozen=True)
class InFlight:
    """A round on its way: its output in pinned memory, valid after `end`, and the event before it."""

    output: RoundOutput
    drafted: int
    begin: torch.cuda.Event
    end: torch.cuda.Event


class GraphRunner:
    """Runs rounds as graphs. A grammar needs the host inside the round, so constrained rounds run op by op."""

    lookahead = 1

    def __init__(self, parts: Parts):
        self.parts = parts
        self._graphs: dict[Key, Captured] = {}
        self._met: set[Key] = set()
        self._results: deque[InFlight] = deque()

    @property
    def num_prepared(self) -> int:
        return len(self._met) + len(self._graphs)

    def launch(self, sampler: Sampler, bound: int, width: int, follow: Follow | None = None) -> None:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        bound = self._captured_bound(bound)
        if follow is not None:
            begin.record()
            output = decode_round(self.parts, sampler, bound, width, follow)
        else:
            run = self._round(sampler, bound, width)
            begin.record()
            output = run()
        output = to_pinned(output)
        end.record()
        self._results.append(InFlight(output, width, begin, end))

    def read(self) -> RoundResult:
        round = self._results.popleft()
        round.end.synchronize()
        return replace(to_host(round.output, round.drafted, 0.0), ms=round.begin.elapsed_time(round.end))

    def drop(self) -> None:
        self._results.clear()

    def _captured_bound(self, bound: int) -> int:
        sequence, size = self.parts.sequence, SHORTEST_BOUND
        while size < bound:
            size *= 2
        return min(size, sequence.context_length + sequence.max_window)

    def _round(self, sampler: Sampler, bound: int, width: int) -> Callable[[], RoundOutput]:
        """What runs the next round: the eager function for a key that was never met, its graph from then on."""
        key = (sampler.mode, bound, width)
        if key not in self._met:
            self._met.add(key)
            return lambda: decode_round(self.parts, sampler, bound, width)
        if key not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = decode_round(self.parts, sampler, bound, width)
            self._graphs[key] = Captured(graph, output)
        captured = self._graphs[key]

        def replay() -> RoundOutput:
            captured.graph.replay()
            return captured.output

        return replay


def to_pinned(output: RoundOutput) -> RoundOutput:
    """The output on its way to pinned memory of its own; the next round may overwrite the device's."""

    def copied(value: torch.Tensor) -> torch.Tensor:
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)

    logprobs = None if output.logprobs is None else type(output.logprobs)(*map(copied, output.logprobs))
    return RoundOutput(copied(output.report), logprobs, None if output.confidence is None else copied(output.confidence))
