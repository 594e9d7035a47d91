"""Rows of a profile: what one round spends on an op."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """An op inside the op on a CPU, a kernel of the op on a GPU."""

    name: str
    calls: int
    ms: float


@dataclass(frozen=True)
class Row:
    """An op in one round: calls, time, and bytes of weights and state that it must move. parts: what it consists of."""

    op: str
    calls: int
    ms: float
    num_bytes: int
    parts: tuple[Part, ...] = ()
