"""One round, op by op: time, bytes, and how near each op comes to what the memory delivers.

On a CPU a clock runs round every op. On a GPU rounds are replays of a graph, whose kernels torch.profiler times; see
`trace.py` for how they find their ops. Watching costs time itself, so the round is also timed unwatched.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from soloist.bench.observe import Call, room_for, round_calls, rounds_of
from soloist.bench.rows import Part, Row
from soloist.bench.trace import MARK, Events, complete, ops_in_order, ops_of, replayed, replays_of
from soloist.errors import UserError
from soloist.llm import LLM, StreamEvent
from soloist.ops.op import Op, observed
from soloist.runtime.traffic import read_rate

SETTLE = 6
"""Rounds before the measured ones: enough to compile and capture."""
TRACED = 3
"""Rounds in the Chrome trace of a CPU."""


@dataclass(frozen=True)
class Profile:
    """rows: of the window. round_ms: the mean of unwatched rounds, watched_ms of those that the table was made of.
    gap_ms: of watched_ms, what no op had. caveat: see Plan. experts: how many different ones a layer chose on average, None
    without any.
    """

    model: str
    on_gpu: bool
    device: str
    dtype: str
    drafter: str
    rows: int
    context: int
    rounds: int
    round_ms: float
    watched_ms: float
    gap_ms: float
    read_rate: float
    caveat: str | None
    experts: float | None
    table: tuple[Row, ...]

    @property
    def num_bytes(self) -> int:
        return sum(row.num_bytes for row in self.table)

    @property
    def limit_ms(self) -> float:
        """What the bytes of the round take at the measured read rate."""
        return self.num_bytes / self.read_rate * 1e3


def profile(llm: LLM, prompt: Sequence[int], rounds: int, trace: Path | None = None) -> Profile:
    """Measure rounds behind a prompt, with as many drafts as the plan says.

    Args: trace: where to write a Chrome trace of watched rounds.
    Raises: UserError for a prompt and rounds that do not fit.
    """
    plan, width = llm.plan, llm.plan.draft_width
    needed = len(prompt) + room_for([width], SETTLE + 2 * rounds)
    if needed > plan.context_length:
        raise UserError(
            f"{len(prompt)} tokens and {rounds} rounds of {width + 1} need a context of {needed}, it has "
            f"{plan.context_length}; lower --context or --rounds, or raise --context-length"
        )
    (calls,) = round_calls(llm, prompt, [width])
    on_gpu = plan.device.startswith("cuda")
    measure = _on_gpu if on_gpu else _on_cpu
    round_ms, watched_ms, gap_ms, table = measure(llm, prompt, width, rounds, trace)
    experts = [call.experts for call in calls if call.experts]
    return Profile(
        model=llm.config.model,
        on_gpu=on_gpu,
        device=plan.device_name,
        dtype=plan.dtype,
        drafter=plan.drafter,
        rows=width + 1,
        context=len(prompt),
        rounds=rounds,
        round_ms=round_ms,
        watched_ms=watched_ms,
        gap_ms=gap_ms,
        read_rate=read_rate(torch.device(plan.device)),
        caveat=plan.caveat,
        experts=mean(experts) if experts else None,
        table=tuple(_counted(table, calls)),
    )


def random_ids(vocab_size: int, count: int) -> list[int]:
    """The same ones every time."""
    rng = random.Random(0)
    return [rng.randrange(vocab_size) for _ in range(count)]


Measured = tuple[float, float, float, Sequence[Row]]
"""round_ms, watched_ms, gap_ms, rows without bytes."""


def _counted(table: Sequence[Row], calls: Sequence[Call]) -> Iterator[Row]:
    """The rows with their bytes and calls, the slowest first."""
    count, num_bytes = Counter(call.op for call in calls), Counter[str]()
    for call in calls:
        num_bytes[call.op] += call.num_bytes
    for row in sorted(table, key=lambda row: -row.ms):
        yield replace(row, calls=count[row.op], num_bytes=num_bytes[row.op])


def _take(events: Iterator[StreamEvent], count: int) -> float:
    """The mean time of the next rounds."""
    return mean(next(events).round_ms or 0.0 for _ in range(count))


# ---- CPU -------------------------------------------------------------------------------------------------------------


class OpClock:
    """Adds up the time of ops, and of the ops inside them. Its own cost, about a microsecond a call, is in the gaps."""

    def __init__(self) -> None:
        self.spent: dict[tuple[str, ...], list[float]] = {}
        self._path: tuple[str, ...] = ()

    @contextmanager
    def around(self, op: Op, args: Any, kwargs: Any) -> Iterator[None]:
        outer, self._path = self._path, (*self._path, op.name)
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.spent.setdefault(self._path, []).append(time.perf_counter() - begun)
            self._path = outer

    def rows(self, rounds: int) -> Iterator[Row]:
        """Per round; of ops inside ops inside ops nothing is told."""
        for path, times in self.spent.items():
            if len(path) == 1:
                inner = {p[1]: t for p, t in self.spent.items() if len(p) == 2 and p[0] == path[0]}
                parts = (Part(name, len(t) // rounds, sum(t) / rounds * 1e3) for name, t in inner.items())
                yield Row(path[0], len(times) // rounds, sum(times) / rounds * 1e3, 0, tuple(parts))


def _on_cpu(llm: LLM, prompt: Sequence[int], width: int, rounds: int, trace: Path | None) -> Measured:
    clock = OpClock()

    def watch(number: int) -> AbstractContextManager[None]:
        return observed("cpu", clock.around) if number >= SETTLE + rounds else nullcontext()

    with rounds_of(llm, prompt, [width], SETTLE + 2 * rounds, watch) as events:
        _take(events, SETTLE)
        round_ms, watched_ms = _take(events, rounds), _take(events, rounds)
    table = list(clock.rows(rounds))
    if trace is not None:
        ranges = Ranges()
        with rounds_of(llm, prompt, [width], TRACED + 1, lambda number: observed("cpu", ranges.around)) as events:
            _take(events, 1)
            with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
                _take(events, TRACED)
        profiler.export_chrome_trace(str(trace))
    return round_ms, watched_ms, watched_ms - sum(row.ms for row in table), table


# ---- GPU -------------------------------------------------------------------------------------------------------------


def _on_gpu(llm: LLM, prompt: Sequence[int], width: int, rounds: int, trace: Path | None) -> Measured:
    known = ops_in_order(_eager_trace(llm, prompt, width))
    with rounds_of(llm, prompt, [width], SETTLE + 2 * rounds) as events:
        _take(events, SETTLE)
        round_ms = _take(events, rounds)
        with _gpu_profiler() as profiler:
            _take(events, rounds)
            torch.cuda.synchronize()
    groups = replayed(_events(profiler))
    if not groups:
        raise UserError("the profiler saw no graph on this GPU; is CUPTI there, and does no other profiler run?")
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    found = replays_of(groups, ops_of([kernel.name for kernel in groups[0]], known))
    return round_ms, found.span_ms, found.gap_ms, found.rows


def _eager_trace(llm: LLM, prompt: Sequence[int], width: int) -> Events:
    """Of one round that runs op by op, each op in a range of its name."""
    profiler, ranges = _gpu_profiler(), Ranges()

    @contextmanager
    def traced() -> Iterator[None]:
        with profiler, observed("cuda", ranges.around):
            yield
            torch.cuda.synchronize()

    with rounds_of(llm, prompt, [width], 2, lambda number: traced() if number == 1 else nullcontext()) as events:
        _take(events, 2)
    return _events(profiler)


class Ranges:
    """Marks ops in a trace, but for those inside others."""

    def __init__(self) -> None:
        self._open = 0

    @contextmanager
    def around(self, op: Op, args: Any, kwargs: Any) -> Iterator[None]:
        self._open += 1
        try:
            with record_function(MARK + op.name) if self._open == 1 else nullcontext():
                yield
        finally:
            self._open -= 1


def _gpu_profiler() -> torch.profiler.profile:
    return torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])


def _events(profiler: torch.profiler.profile) -> Events:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return complete(json.loads(path.read_text()))
