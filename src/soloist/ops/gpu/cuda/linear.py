"""Skinny bf16 products in CUDA C++, see linear.cu. What does not suit them is left to the Triton kernels."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np
import torch

from soloist.ops.gpu import linear as triton_linear
from soloist.ops.gpu.cuda.program import is_available, kernel
from soloist.ops.gpu.launch import next_power_of_2, num_sms
from soloist.ops.linear import linear, linear_fp32
from soloist.ops.norm_linear import add_norm_gate_up, add_norm_linear, gated_norm_linear

PLAIN, NORM, GATED = range(3)
CHUNK, OUTS, ROWS, WARPS = 32, 16, 8, 8
THREADS = (WARPS + 1) * 32
PIECE, MOST_SLOTS = 512, 16
"""Columns of a piece of a weight row, and most slots of a ring: as in ring.cuh."""
MOST_ROWS = 16
MOST_SHARED = 224 * 1024
"""Bytes of shared memory that a block may have, without what the kernels declare themselves."""
RING_BYTES = 124 * 1024
"""Of a product's weights on their way. 92 KB, with which every kernel fits beside the one ahead, took 3 % longer a round."""
MOST_X = 64 * 1024
"""Bytes of x up to which it is copied to shared memory where nothing has to be computed of it."""


def suits(x: torch.Tensor, weight: Any) -> bool:
    """bf16 weights on a GPU that multiplies them, whole chunks, 16-byte rows, a round's window."""
    return (
        isinstance(weight, torch.Tensor) and weight.dtype == torch.bfloat16 and is_available(weight.device)
        and weight.is_contiguous() and weight.shape[1] % CHUNK == 0 and x.shape[0] <= MOST_ROWS
    )  # fmt: skip


def lies_well(*rows: torch.Tensor | None) -> bool:
    """bf16 rows that can be read 16 bytes at a time."""
    return all(
        x is None or (x.dtype == torch.bfloat16 and x.stride(-1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0)
        for x in rows
    )


def sums_bytes(halves: int) -> int:
    """Of a block's sums: [2][WARPS][halves * ROWS * OUTS], and of squares [WARPS][halves * ROWS]."""
    return WARPS * halves * ROWS * (2 * OUTS + 1) * 4


def row_bytes(K: int) -> int:
    """Of a row of x in shared memory."""
    return (K + CHUNK) * 2


def slot_bytes(rows: int) -> int:
    """Of a slot of a ring, which holds a piece of so many weight rows."""
    return rows * (PIECE * 2 + 64)


def slots(rows: int, others: int, most: int = RING_BYTES) -> int:
    """How many slots a ring has beside so many other bytes: at most `most` bytes of them, 0 if not even two fit."""
    found = min(MOST_SLOTS, most // slot_bytes(rows), (MOST_SHARED - others) // slot_bytes(rows))
    return found if found >= 2 else 0


def fits(K: int) -> bool:
    """Whether a block holds the longest window's x beside two slots. The same for all windows, or a row's bits would differ."""
    return slots(OUTS, sums_bytes(MOST_ROWS // ROWS) + MOST_ROWS * row_bytes(K)) > 0


def tile_rows(N: int, sms: int) -> int:
    """Weight rows of a tile, an even number, so that the multiprocessors share N out evenly: the most that one makes are few."""
    return min(range(OUTS, 7, -2), key=lambda rows: ceil(ceil(N / rows) / sms) * rows)


def run(
    prologue: int, x: torch.Tensor, weight: torch.Tensor, branch: torch.Tensor | None = None, norm: torch.Tensor | None = None,
    gate: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 0.0, head: int = 0, pairs: bool = False,
    limit: float = 0.0, wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Launch `linear` for x [T, ...].   Returns: (y [T, N], or [T, N / 2] after the activation; the new residual stream)."""
    T, (N, K), sms = x.shape[0], weight.shape, num_sms(x.device)
    branch = None if branch is None else branch.contiguous()
    outs, halves, rows = N // 2 if pairs else N, -(-T // ROWS), tile_rows(N, sms)
    direct = prologue == PLAIN and T * row_bytes(K) > MOST_X
    y = triton_linear.product_rows(T, outs, torch.float32 if wide else weight.dtype, x.device)
    stream = x if branch is None else torch.empty((T, K), dtype=x.dtype, device=x.device)
    others = sums_bytes(halves) + (0 if direct else T * row_bytes(K))
    depth = slots(rows, others)
    function = kernel(
        "linear", "linear", MOST_SHARED, x.device, K=K, TILE_ROWS=rows, HALVES=halves, PROLOGUE=prologue, DIRECT=direct,
        BRANCH=branch is not None, BIAS=bias is not None, PAIRS=pairs, WIDE_OUT=wide, HEAD=head or 1,
    )  # fmt: skip
    function(
        (min(sms, -(-N // rows)),), THREADS, depth * slot_bytes(rows) + others, x, branch, norm, gate, weight, bias, y, stream,
        np.int32(depth), np.int32(T), np.int32(N), np.int64(x.stride(0)), np.int64(0 if gate is None else gate.stride(0)),
        np.int64(y.stride(0)), np.float32(eps), np.float32(limit),
    )  # fmt: skip
    return y, stream


@linear.impl("cuda", on="cuda")
def _linear(x, weight, bias=None):
    if not (suits(x, weight) and lies_well(x)):
        return triton_linear._linear(x, weight, bias)
    return run(PLAIN, x, weight, bias=bias)[0]


@linear_fp32.impl("cuda", on="cuda")
def _linear_fp32(x, weight):
    if not (suits(x, weight) and lies_well(x)):
        return triton_linear._linear_fp32(x, weight)
    return run(PLAIN, x, weight, wide=True)[0]


@add_norm_linear.impl("cuda", on="cuda")
def _add_norm_linear(residual, branch, norm, weight, bias=None):
    if not (suits(residual, weight) and fits(weight.shape[1]) and lies_well(residual, branch)):
        return triton_linear._add_norm_linear(residual, branch, norm, weight, bias)
    return run(NORM, residual, weight, branch, norm[0], bias=bias, eps=norm[1])


@add_norm_gate_up.impl("cuda", on="cuda")
def _add_norm_gate_up(residual, branch, norm, weight, limit=0.0):
    if not (suits(residual, weight) and fits(weight.shape[1]) and lies_well(residual, branch)):
        return triton_linear._add_norm_gate_up(residual, branch, norm, weight, limit)
    return run(NORM, residual, weight, branch, norm[0], eps=norm[1], pairs=True, limit=limit)


@gated_norm_linear.impl("cuda", on="cuda")
def _gated_norm_linear(o, gate, norm, weight):
    head, rows = o.shape[2], gate.flatten(1) if gate.stride(1) == gate.shape[2] else None
    heads = 32 <= head <= 256 and head == next_power_of_2(head) and rows is not None and o.is_contiguous()
    if not (heads and suits(o, weight) and fits(weight.shape[1]) and lies_well(rows)):
        return triton_linear._gated_norm_linear(o, gate, norm, weight)
    return run(GATED, o.flatten(1), weight, norm=norm[0], gate=rows, eps=norm[1], head=head)[0]
