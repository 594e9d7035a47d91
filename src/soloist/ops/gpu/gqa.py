"""Grouped-query attention of a round in two kernels: attend over runs of the context, join the runs.

Keys of the window are normed and turned where they are needed, by the program of their run, which also caches them. So no
kernel stands before the attention. Channels come as two halves, the partners of a rotation side by side.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from soloist.ops.gpu.attention import (
    ROWS,
    TILE,
    cache_rows,
    join_runs,
    log_weight,
    num_runs,
    run_first,
    run_size,
    turn,
    weigh,
)
from soloist.ops.gpu.launch import depend, launch, next_power_of_2
from soloist.ops.gqa import gqa_round


@triton.jit
def load_turned(x_ptr, at, inside, norm_ptr, eps, cos_ptr, sin_ptr, t, D, HAS_NORM: tl.constexpr, STEP: tl.constexpr,
                BD: tl.constexpr):  # fmt: skip
    """Rows at x_ptr + at, normed and turned by the angles of their window rows t: two halves [rows, BD], rounded as stored."""
    dtype = x_ptr.dtype.element_ty
    half = D // 2
    i = tl.arange(0, BD)
    pair = i < half
    mask = inside[:, None] & pair[None, :]
    one = i * STEP
    other = one + (1 if STEP == 2 else half)
    first = tl.load(x_ptr + at[:, None] + one[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at[:, None] + other[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / D + eps)[:, None]
        weight = tl.load(norm_ptr + one, mask=pair, other=0.0).to(tl.float32)[None, :]
        other_weight = tl.load(norm_ptr + other, mask=pair, other=0.0).to(tl.float32)[None, :]
        first = ((first * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * other_weight).to(dtype).to(tl.float32)
    angle = t[:, None] * half + i[None, :]
    cos = tl.load(cos_ptr + angle, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=mask, other=0.0)
    first, second = turn(first, second, cos, sin)
    return first.to(dtype), second.to(dtype)


@triton.jit
def load_tile(keys_ptr, values_ptr, entry, inside, D, STEP: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr):
    """Cached keys, in halves, and values at `entry` [TILE]; 0 where not `inside`. Past the first-level cache, see `mla`."""
    i = tl.arange(0, BD)[None, :]
    d = tl.arange(0, BV)[None, :]
    mask = inside[:, None] & (i < D // 2)
    one = i * STEP
    other = one + (1 if STEP == 2 else D // 2)
    first = tl.load(keys_ptr + entry[:, None] + one, mask=mask, other=0.0, cache_modifier=".cg")
    second = tl.load(keys_ptr + entry[:, None] + other, mask=mask, other=0.0, cache_modifier=".cg")
    values = tl.load(values_ptr + entry[:, None] + d, mask=inside[:, None] & (d < D), other=0.0, cache_modifier=".cg")
    return first, second, values


@triton.jit
def renew_tile(first, second, values, keys_ptr, values_ptr, entry, new, writes, qkv_ptr, at, norm_ptr, eps, cos_ptr, sin_ptr,
               t, G, D, HAS_NORM: tl.constexpr, STEP: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """Put the window's own keys and values into the tile where it is `new`, and into the cache if it is ours to write."""
    i = tl.arange(0, BD)[None, :]
    d = tl.arange(0, BV)[None, :]
    own_first, own_second = load_turned(qkv_ptr, at, new, norm_ptr, eps, cos_ptr, sin_ptr, t, D, HAS_NORM, STEP, BD)
    own_values = tl.load(qkv_ptr + at[:, None] + G * D + d, mask=new[:, None] & (d < D), other=0.0)
    one = i * STEP
    other = one + (1 if STEP == 2 else D // 2)
    mask = (new & writes)[:, None] & (i < D // 2)
    tl.store(keys_ptr + entry[:, None] + one, own_first, mask=mask)
    tl.store(keys_ptr + entry[:, None] + other, own_second, mask=mask)
    tl.store(values_ptr + entry[:, None] + d, own_values, mask=(new & writes)[:, None] & (d < D))
    new = new[:, None]
    return tl.where(new, own_first, first), tl.where(new, own_second, second), tl.where(new, own_values, values)


@triton.jit
def step(q_first, q_second, first, second, values, scale, visible, m, total, acc):
    """Take one tile in."""
    scores = tl.dot(q_first, tl.trans(first), input_precision="ieee")
    scores = tl.dot(q_second, tl.trans(second), scores, input_precision="ieee") * scale
    weights, keep, m, total = weigh(scores, visible, m, total)
    return m, total, tl.dot(weights.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")


@triton.jit(do_not_specialize=["T"])
def attend_kernel(
    qkv_ptr, qkv_row, q_norm_ptr, k_norm_ptr, eps, cos_ptr, sin_ptr, keys_ptr, values_ptr, table_ptr, start_ptr, parts_ptr,
    logs_ptr, scale, T, H, G, D,
    P: tl.constexpr, HAS_TABLE: tl.constexpr, HAS_NORM: tl.constexpr, STEP: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (run, key head, 16 of its T * H / G rows): parts [runs, T * H, D], logs [runs, T * H]."""
    run = tl.program_id(0)
    g = tl.program_id(1)
    group = H // G
    begin = run_first(run)
    start = tl.load(start_ptr).to(tl.int32)
    # The first tile's entries of earlier rounds are on their way while the kernel ahead still runs.
    position = begin + tl.arange(0, TILE)
    page, offset = cache_rows(table_ptr, position, position < start + T, P, HAS_TABLE)
    entry = ((page * G + g) * P + offset) * D
    first, second, values = load_tile(keys_ptr, values_ptr, entry, position < start, D, STEP, BD, BV)
    depend(PDL)
    end = start + T
    if begin < end:
        writes = tl.program_id(2) == 0
        own = qkv_ptr + (H + g) * D
        if begin + TILE > start:
            new = (position >= start) & (position < end)
            first, second, values = renew_tile(
                first, second, values, keys_ptr, values_ptr, entry, new, writes, own, (position - start) * qkv_row, k_norm_ptr,
                eps, cos_ptr, sin_ptr, position - start, G, D, HAS_NORM, STEP, BD, BV,
            )  # fmt: skip
        row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        of_row = row < T * group
        t = row // group
        head = g * group + row % group
        q_first, q_second = load_turned(
            qkv_ptr, t * qkv_row + head * D, of_row, q_norm_ptr, eps, cos_ptr, sin_ptr, t, D, HAS_NORM, STEP, BD
        )
        last = (start + t)[:, None]
        m = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, BV), tl.float32)
        m, total, acc = step(q_first, q_second, first, second, values, scale, position[None, :] <= last, m, total, acc)
        for tile in range(TILE, tl.minimum(run_size(run), end - begin), TILE):
            here = position + tile
            page, offset = cache_rows(table_ptr, here, here < end, P, HAS_TABLE)
            entry = ((page * G + g) * P + offset) * D
            first, second, values = load_tile(keys_ptr, values_ptr, entry, here < start, D, STEP, BD, BV)
            if begin + tile + TILE > start:
                new = (here >= start) & (here < end)
                first, second, values = renew_tile(
                    first, second, values, keys_ptr, values_ptr, entry, new, writes, own, (here - start) * qkv_row, k_norm_ptr,
                    eps, cos_ptr, sin_ptr, here - start, G, D, HAS_NORM, STEP, BD, BV,
                )  # fmt: skip
            m, total, acc = step(q_first, q_second, first, second, values, scale, here[None, :] <= last, m, total, acc)
        logs, divisor = log_weight(m, total)
        at = run.to(tl.int64) * T * H + t * H + head
        tl.store(logs_ptr + at, logs, mask=of_row)
        d = tl.arange(0, BV)
        out = (acc / divisor[:, None]).to(parts_ptr.dtype.element_ty)
        tl.store(parts_ptr + at[:, None] * D + d[None, :], out, mask=of_row[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["T"])
def join_kernel(parts_ptr, logs_ptr, start_ptr, out_ptr, T, H, D, BV: tl.constexpr, PDL: tl.constexpr):
    """Program (window row and head): out [T, H * D]."""
    row = tl.program_id(0)
    position = tl.load(start_ptr).to(tl.int32) + row // H
    depend(PDL)
    d = tl.arange(0, BV)
    context = join_runs(parts_ptr, logs_ptr, row, T * H, position, D, BV)
    tl.store(out_ptr + row * D + d, context.to(out_ptr.dtype.element_ty), mask=d < D)


@gqa_round.impl("triton", on="cuda")
def _triton(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    keys: torch.Tensor,
    values: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
    table: torch.Tensor | None,
    start: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`page` and `offset` are not read: the kernel knows where its run lies."""
    (T, heads, D), (pages, G, P, _) = qkv.shape, keys.shape
    H = heads - 2 * G
    assert qkv.stride()[1:] == (D, 1) and keys.is_contiguous() and values.is_contiguous()
    device, BV = qkv.device, max(next_power_of_2(D), 16)
    runs = num_runs((pages if table is None else table.shape[0]) * P)
    parts, logs = qkv.new_empty(runs, T * H, D), qkv.new_empty(runs, T * H, dtype=torch.float32)
    grid = runs, G, triton.cdiv(T * (H // G), ROWS.value)
    launch(attend_kernel, grid, qkv, qkv.stride(0), q_norm, k_norm, eps, cos.contiguous(), sin.contiguous(), keys, values,
           start if table is None else table, start, parts, logs, scale * math.log2(math.e), T, H, G, D, device=device, P=P,
           HAS_TABLE=table is not None, HAS_NORM=q_norm is not None, STEP=2 if interleaved else 1,
           BD=max(next_power_of_2(D // 2), 16), BV=BV, num_warps=8 if BV > 64 else 4, num_stages=1)  # fmt: skip
    out = qkv.new_empty(T, H * D)
    launch(join_kernel, (T * H,), parts, logs, start, out, T, H, D, device=device, BV=BV, num_warps=4)
    return out
