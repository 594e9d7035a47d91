"""Skinny bf16 products in CUDA C++, see linear.cu. What does not suit them is left to the Triton kernels."""

from __future__ import annotations

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
MOST_ROWS = 16
MOST_SHARED = 65536
"""Bytes of x up to which it is kept in shared memory, where a block makes several tiles."""


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


def num_warps(K: int, head: int) -> int:
    """Warps that share the inputs out; a gated head belongs to one warp whole."""
    return max(w for w in range(1, WARPS + 1) if K // head % w == 0) if head else WARPS


def pieces(K: int, warps: int, halves: int, tiles: int) -> dict[str, int]:
    """How the weights of a block's tiles come in, see Tiles in common.cuh: a lane spends up to 96 registers on them, fewer
    where it sums for 16 rows.
    """
    chunks = -(-K // CHUNK // warps)
    stages = -(-chunks // (6 if halves == 1 else 4))
    stage = -(-chunks // stages)
    return {"STAGE": stage, "STAGES": stages, "DEPTH": max(1, min((96 if halves == 1 else 72) // (8 * stage), stages * tiles))}


def run(
    prologue: int, x: torch.Tensor, weight: torch.Tensor, branch: torch.Tensor | None = None, norm: torch.Tensor | None = None,
    gate: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 0.0, head: int = 0, pairs: bool = False,
    limit: float = 0.0, wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Launch `linear` for x [T, ...].   Returns: (y [T, N], or [T, N / 2] after the activation; the new residual stream)."""
    T, (N, K), sms = x.shape[0], weight.shape, num_sms(x.device)
    branch = None if branch is None else branch.contiguous()
    outs, warps, halves = N // 2 if pairs else N, num_warps(K, head), -(-T // ROWS)
    tiles = -(-outs // (OUTS // 2 if pairs else OUTS))
    grid = tiles if tiles <= 2 * sms else sms if tiles <= 8 * sms else 2 * sms  # two blocks fit, so these need no second turn
    direct = prologue == PLAIN and (tiles <= grid or halves * ROWS * K * 2 > MOST_SHARED)
    y = triton_linear.product_rows(T, outs, torch.float32 if wide else weight.dtype, x.device)
    stream = x if branch is None else torch.empty((T, K), dtype=x.dtype, device=x.device)
    sums = warps * halves * ROWS * (2 * OUTS + 1) * 4

    def shared_bytes(rows: int) -> int:
        """Sums, x, and what its prologue stages."""
        x_bytes = 0 if direct else rows * (K + CHUNK) * 2
        return sums + x_bytes + (x_bytes if branch is not None else min(rows, 4) * K * 6 if prologue == GATED else 0)

    function = kernel(
        "linear", "linear", shared_bytes(halves * ROWS), x.device, K=K, WARPS=warps, HALVES=halves, PROLOGUE=prologue,
        DIRECT=direct, BRANCH=branch is not None, BIAS=bias is not None, PAIRS=pairs, WIDE_OUT=wide, HEAD=head or 1,
        **pieces(K, warps, halves, -(-tiles // grid)),
    )  # fmt: skip
    function(
        (grid,), warps * 32, shared_bytes(T), x, branch, norm, gate, weight, bias, y, stream, np.int32(T), np.int32(N),
        np.int64(x.stride(0)), np.int64(0 if gate is None else gate.stride(0)), np.int64(y.stride(0)), np.float32(eps),
        np.float32(limit),
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
    if not (suits(residual, weight) and lies_well(residual, branch)):
        return triton_linear._add_norm_linear(residual, branch, norm, weight, bias)
    return run(NORM, residual, weight, branch, norm[0], bias=bias, eps=norm[1])


@add_norm_gate_up.impl("cuda", on="cuda")
def _add_norm_gate_up(residual, branch, norm, weight, limit=0.0):
    if not (suits(residual, weight) and lies_well(residual, branch)):
        return triton_linear._add_norm_gate_up(residual, branch, norm, weight, limit)
    return run(NORM, residual, weight, branch, norm[0], eps=norm[1], pairs=True, limit=limit)


@gated_norm_linear.impl("cuda", on="cuda")
def _gated_norm_linear(o, gate, norm, weight):
    head, rows = o.shape[2], gate.flatten(1) if gate.stride(1) == gate.shape[2] else None
    fits = 32 <= head <= 256 and head == next_power_of_2(head) and rows is not None and o.is_contiguous()
    if not (fits and suits(o, weight) and lies_well(rows)):
        return triton_linear._gated_norm_linear(o, gate, norm, weight)
    return run(GATED, o.flatten(1), weight, norm=norm[0], gate=rows, eps=norm[1], head=head)[0]
