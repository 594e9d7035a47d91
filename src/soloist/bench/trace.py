"""Kernels of a GPU, as torch.profiler's trace tells them, given to the ops that they belong to.

In a replayed graph a kernel knows nothing of the op that it was captured in. So one round is also run op by op, where
every launch falls into an op's range; the kernels of a replay are then found in that list by their names and order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from soloist.bench.rows import Part, Row

MARK = "op "
"""Begins the name of an op's range."""
OUTSIDE, UNKNOWN = "outside ops", "unknown"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Events = Sequence[Mapping[str, Any]]
"""Complete events (`ph` X) of a Chrome trace; times in microseconds."""


@dataclass(frozen=True)
class Kernel:
    name: str
    begin_us: float
    end_us: float


@dataclass(frozen=True)
class Replays:
    """Means over replays of one graph. span_ms: from the first kernel's begin to the last one's end; gap_ms: of it, the
    time in which no kernel ran. Kernels that overlap share nothing: of the overlap the earlier one has all.
    """

    count: int
    span_ms: float
    gap_ms: float
    rows: tuple[Row, ...]


def ops_in_order(events: Events) -> list[tuple[str, str]]:
    """(kernel, op) of a round that ran op by op, in the order of the device."""
    ranges = sorted((e["ts"], e["ts"] + e["dur"], e["name"].removeprefix(MARK)) for e in events
                    if e.get("cat") == "user_annotation" and e["name"].startswith(MARK))  # fmt: skip
    begins = [begin for begin, _, _ in ranges]
    launched = {e["args"]["correlation"]: e["ts"] for e in events
                if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})}  # fmt: skip

    def op_at(ts: float | None) -> str:
        place = 0 if ts is None else bisect_right(begins, ts)
        return ranges[place - 1][2] if place and ts is not None and ts <= ranges[place - 1][1] else OUTSIDE

    found = sorted((e for e in events if e.get("cat") in ON_DEVICE), key=lambda e: e["ts"])
    return [(e["name"], op_at(launched.get(e["args"].get("correlation")))) for e in found]


def replayed(events: Events) -> list[list[Kernel]]:
    """The kernels of each launched graph, in the order of the device; only whole replays of the commonest kind."""
    launches = {e["args"]["correlation"] for e in events if e.get("name", "").startswith("cudaGraphLaunch")}
    groups: dict[int, list[Kernel]] = {}
    for e in events:
        if e.get("cat") in ON_DEVICE and e["args"].get("correlation") in launches:
            groups.setdefault(e["args"]["correlation"], []).append(Kernel(e["name"], e["ts"], e["ts"] + e["dur"]))
    ordered = [sorted(group, key=lambda k: k.begin_us) for group in groups.values()]
    kinds = [tuple(kernel.name for kernel in group) for group in ordered]
    usual = max(set(kinds), key=lambda kind: (kinds.count(kind), len(kind)), default=())
    return [group for group, kind in zip(ordered, kinds, strict=True) if kind == usual]


def ops_of(names: Sequence[str], known: Sequence[tuple[str, str]]) -> list[str]:
    """The op of each kernel of a replay, UNKNOWN for one that is not in the known list at its place."""
    ops = [UNKNOWN] * len(names)
    matcher = SequenceMatcher(None, [name for name, _ in known], names, autojunk=False)
    for there, here, size in matcher.get_matching_blocks():
        for i in range(size):
            ops[here + i] = known[there + i][1]
    return ops


def replays_of(groups: Sequence[Sequence[Kernel]], ops: Sequence[str]) -> Replays:
    """Args: replays of one graph; the op of each of its kernels."""
    assert groups and all(len(group) == len(ops) for group in groups), "replays of one graph have the same kernels"
    n, gap, span = len(groups), 0.0, 0.0
    own_us = [0.0] * len(ops)
    for group in groups:
        cursor = group[0].begin_us
        for i, kernel in enumerate(group):
            gap += max(kernel.begin_us - cursor, 0.0)
            own_us[i] += max(kernel.end_us - max(cursor, kernel.begin_us), 0.0)
            cursor = max(cursor, kernel.end_us)
        span += cursor - group[0].begin_us
    parts: dict[str, dict[str, list[float]]] = {}
    for op, kernel, us in zip(ops, groups[0], own_us, strict=True):
        parts.setdefault(op, {}).setdefault(kernel.name, []).append(us / n / 1e3)
    rows = tuple(
        Row(op, 0, sum(sum(ms) for ms in each.values()), 0, tuple(Part(name, len(ms), sum(ms)) for name, ms in each.items()))
        for op, each in parts.items()
    )
    return Replays(n, span / n / 1e3, gap / n / 1e3, rows)


def complete(trace: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The complete events of a trace file's content."""
    events: Iterable[Mapping[str, Any]] = trace["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]
