"""What the attention kernels of a round share: how a context is cut into runs, and how the runs' results are joined.

A run of positions is one program's work. Where runs begin and end is a function of the position alone: 64 positions each
below 8192, then 64 runs in every octave. So a row's sums are grouped alike whatever the context's length and the window's
width, and long contexts still make few runs. Every run leaves its own softmax average, and the logarithm of its weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = tl.constexpr(64)
"""Positions that are loaded together."""
SHORT_RUNS = tl.constexpr(128)
"""Runs of one tile, at the beginning of the context."""
PER_OCTAVE = tl.constexpr(64)
ROWS = tl.constexpr(16)
"""Query rows of one product."""
JOINED = tl.constexpr(64)
"""Runs that are joined at once."""

FIRST_OCTAVE = 13
LAST_OCTAVE = 30


def num_runs(bound: int) -> int:
    """Runs that begin below position `bound`, at least 1."""
    last = bound - 1
    octave = last.bit_length() - 1
    if octave < FIRST_OCTAVE:
        return last // TILE.value + 1
    inside = (last - (1 << octave)) // ((1 << octave) // PER_OCTAVE.value)
    return SHORT_RUNS.value + (octave - FIRST_OCTAVE) * PER_OCTAVE.value + inside + 1


@triton.jit
def run_size(run):
    """Positions of a run."""
    octave = tl.maximum(run - SHORT_RUNS, 0) // PER_OCTAVE
    return tl.where(run < SHORT_RUNS, TILE, (2 * TILE) << octave)


@triton.jit
def run_first(run):
    """The position at which a run begins."""
    octave = tl.maximum(run - SHORT_RUNS, 0) // PER_OCTAVE
    inside = tl.maximum(run - SHORT_RUNS, 0) % PER_OCTAVE
    return tl.where(run < SHORT_RUNS, run * TILE, (TILE * SHORT_RUNS + inside * 2 * TILE) << octave)


@triton.jit
def run_of(position):
    """The run in which a position lies."""
    octave = 0
    for power in tl.static_range(14, 31):
        octave += (position >= (1 << power)).to(tl.int32)
    first = (TILE * SHORT_RUNS) << octave
    return tl.where(
        position < TILE * SHORT_RUNS,
        position // TILE,
        SHORT_RUNS + octave * PER_OCTAVE + (position - first) // ((2 * TILE) << octave),
    )


@triton.jit
def cache_rows(table_ptr, position, inside, P: tl.constexpr, HAS_TABLE: tl.constexpr):
    """(page, offset) of positions; those not `inside` may be any."""
    page = (position // P).to(tl.int64)
    if HAS_TABLE:
        page = tl.load(table_ptr + page, mask=inside, other=0).to(tl.int64)
    return page, position % P


@triton.jit
def weigh(scores, visible, m, total):
    """One step of a softmax over tiles. All in powers of two; rows that see nothing keep m = -inf and weights of 0.

    Returns: weights [ROWS, TILE], the factor for what was summed before, the new m and total.
    """
    scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(m, tl.max(scores, 1))
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - anchor[:, None])
    keep = tl.exp2(m - anchor)
    return weights, keep, highest, total * keep + tl.sum(weights, 1)


@triton.jit
def log_weight(m, total):
    """log2 of a run's weight, -inf where a row saw nothing of it; and what its sum is to be divided by."""
    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    return tl.where(some, m + tl.log2(divisor), float("-inf")), divisor


@triton.jit
def join_runs(parts_ptr, logs_ptr, row, num_rows, position, width, BD: tl.constexpr):
    """The average over all runs that a row at `position` sees: [BD] fp32, from parts [runs, rows, width] and logs [runs, rows].

    Runs beyond the position are not read. They add exact zeros, so the order of the sum is that of any longer context.
    """
    d = tl.arange(0, BD)
    highest = float("-inf")
    total = 0.0
    acc = tl.zeros((BD,), tl.float32)
    for first in range(0, run_of(position) + 1, JOINED):
        run = first + tl.arange(0, JOINED)
        seen = run_first(run) <= position
        at = run.to(tl.int64) * num_rows + row
        logs = tl.load(logs_ptr + at, mask=seen, other=float("-inf"))
        part = tl.load(parts_ptr + at[:, None] * width + d[None, :], mask=seen[:, None] & (d < width)[None, :], other=0.0)
        new = tl.maximum(highest, tl.max(logs, 0))
        weights = tl.exp2(logs - new)
        keep = tl.exp2(highest - new)
        acc = acc * keep + tl.sum(part.to(tl.float32) * weights[:, None], 0)
        total = total * keep + tl.sum(weights, 0)
        highest = new
    return acc / total


@triton.jit
def turn(first, second, cos, sin):
    """Rotate channel pairs, fp32."""
    return first * cos - second * sin, second * cos + first * sin
