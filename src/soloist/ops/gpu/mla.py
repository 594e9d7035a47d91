"""Gated MLA of a round in three kernels: absorb, attend over runs of the context, join and project.

The first also writes the window's latents; the second reads each cached latent once for all heads of 16 rows.
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
from soloist.ops.mla import mla_round

ABSORBED = tl.constexpr(64)
"""Latent channels of one absorbing program."""
WINDOW = tl.constexpr(8)
"""Window rows of one absorbing product."""
PROJECTED = tl.constexpr(32)
"""Value channels of one joining program."""


@triton.jit
def absorb(q_ptr, q_row, q_head, up_key_ptr, out_ptr, head, chunk, T, H, R, N, width, BN: tl.constexpr, PDL: tl.constexpr):
    """out[t, head, r] = sum over n of up_key[head, r, n] q[t, head, n], for the chunk's r and all t."""
    r = chunk * ABSORBED + tl.arange(0, ABSORBED)
    n = tl.arange(0, BN)
    inside = (r < R)[:, None] & (n < N)[None, :]
    weight = tl.load(up_key_ptr + head * R * N + r[:, None] * N + n[None, :], mask=inside, other=0.0)
    depend(PDL)
    for begin in range(0, T, WINDOW):
        t = begin + tl.arange(0, WINDOW)
        x_inside = (n < N)[:, None] & (t < T)[None, :]
        x = tl.load(q_ptr + t[None, :] * q_row + head * q_head + n[:, None], mask=x_inside, other=0.0)
        y = tl.dot(weight, x, input_precision="ieee")
        at = out_ptr + (t[None, :] * H + head) * width + r[:, None]
        tl.store(at, y.to(out_ptr.dtype.element_ty), mask=(r < R)[:, None] & (t < T)[None, :])


@triton.jit
def load_turned(x_ptr, one, other, inside, cos, sin):
    """Both halves of channel pairs after their rotation, fp32."""
    first = tl.load(x_ptr + one, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + other, mask=inside, other=0.0).to(tl.float32)
    return turn(first, second, cos, sin)


@triton.jit
def enter(
    q_ptr, q_row, q_head, kv_ptr, kv_row, weight_ptr, eps, cos_ptr, sin_ptr, latents_ptr, page_ptr, offset_ptr, out_ptr,
    t, H, R, N, DR, P,
    STEP: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr, BHALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Window row t's entry into the cache, and the turned part of its queries."""
    dtype = latents_ptr.dtype.element_ty
    r = tl.arange(0, BR)
    norm = tl.load(weight_ptr + r, mask=r < R, other=0.0).to(tl.float32)
    depend(PDL)
    latent = tl.load(kv_ptr + t * kv_row + r, mask=r < R, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(latent * latent, 0) / R + eps)
    entry = latents_ptr + (tl.load(page_ptr + t) * P + tl.load(offset_ptr + t)) * (R + DR)
    tl.store(entry + r, ((latent * scale).to(dtype).to(tl.float32) * norm).to(dtype), mask=r < R)

    half = DR // 2
    i = tl.arange(0, BHALF)
    pair = i < half
    one = i * STEP
    other = one + (1 if STEP == 2 else half)
    cos = tl.load(cos_ptr + t * half + i, mask=pair, other=0.0)
    sin = tl.load(sin_ptr + t * half + i, mask=pair, other=0.0)
    first, second = load_turned(kv_ptr + t * kv_row + R, one, other, pair, cos, sin)
    tl.store(entry + R + one, first.to(dtype), mask=pair)
    tl.store(entry + R + other, second.to(dtype), mask=pair)

    h = tl.arange(0, BH)[:, None]
    inside = (h < H) & pair[None, :]
    q = q_ptr + t * q_row + h * q_head + N
    q_first, q_second = load_turned(q, one[None, :], other[None, :], inside, cos[None, :], sin[None, :])
    out = out_ptr + (t * H + h) * (R + DR) + R
    tl.store(out + one[None, :], q_first.to(dtype), mask=inside)
    tl.store(out + other[None, :], q_second.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["T"])
def absorb_kernel(
    q_ptr, q_row, q_head, kv_ptr, kv_row, weight_ptr, eps, up_key_ptr, cos_ptr, sin_ptr, latents_ptr, page_ptr, offset_ptr,
    out_ptr, T, H, R, N, DR, P,
    STEP: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr, BHALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs 0 .. H * chunks - 1 make the latent part of the queries out [T, H, R + DR]; one a window row does the rest."""
    program = tl.program_id(0)
    chunks = tl.cdiv(R, ABSORBED)
    row = program - H * chunks
    if row < 0:
        absorb(q_ptr, q_row, q_head, up_key_ptr, out_ptr, program // chunks, program % chunks, T, H, R, N, R + DR, BN, PDL)
    else:
        enter(q_ptr, q_row, q_head, kv_ptr, kv_row, weight_ptr, eps, cos_ptr, sin_ptr, latents_ptr, page_ptr, offset_ptr,
              out_ptr, row, H, R, N, DR, P, STEP, BR, BH, BHALF, PDL)  # fmt: skip


@triton.jit
def load_latents(latents_ptr, table_ptr, position, inside, R, DR, P: tl.constexpr, HAS_TABLE: tl.constexpr,
                 SLABS: tl.constexpr, BR: tl.constexpr, BDR: tl.constexpr):  # fmt: skip
    """Latents [SLABS, TILE, BR] and turned keys [TILE, BDR] of positions; 0 where not `inside`. Past the first-level cache,
    which may still hold what a line was before this round's entries came into it."""
    page, offset = cache_rows(table_ptr, position, inside, P, HAS_TABLE)
    entry = latents_ptr + (page * P + offset) * (R + DR)
    r = (tl.arange(0, SLABS) * BR)[:, None, None] + tl.arange(0, BR)[None, None, :]
    d = tl.arange(0, BDR)[None, :]
    latent = tl.load(entry[None, :, None] + r, mask=inside[None, :, None] & (r < R), other=0.0, cache_modifier=".cg")
    turned = tl.load(entry[:, None] + R + d, mask=inside[:, None] & (d < DR), other=0.0, cache_modifier=".cg")
    return latent, turned


@triton.jit
def step(q, q_turned, latent, turned, scale, visible, m, total, acc):
    """Take one tile in: q, acc [SLABS, ROWS, BR], latent [SLABS, TILE, BR]; a slab is a warp's share of both products."""
    scores = tl.trans(tl.sum(tl.dot(latent, tl.permute(q, (0, 2, 1)), input_precision="ieee"), 0))
    scores = (scores + tl.dot(q_turned, tl.trans(turned), input_precision="ieee")) * scale
    weights, keep, m, total = weigh(scores, visible, m, total)
    shared = tl.broadcast_to(weights.to(latent.dtype)[None], (latent.shape[0], ROWS, TILE))
    return m, total, tl.dot(shared, latent, acc * keep[None, :, None], input_precision="ieee")


@triton.jit(do_not_specialize=["T"])
def attend_kernel(
    q_ptr, latents_ptr, table_ptr, start_ptr, parts_ptr, logs_ptr, scale, T, H, R, DR,
    P: tl.constexpr, HAS_TABLE: tl.constexpr, SLABS: tl.constexpr, BR: tl.constexpr, BDR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (run, 16 rows of the T * H): parts [runs, T * H, R], logs [runs, T * H]."""
    run = tl.program_id(0)
    begin = run_first(run)
    start = tl.load(start_ptr).to(tl.int32)
    # The first tile's entries of earlier rounds are on their way while the kernel ahead still runs.
    position = begin + tl.arange(0, TILE)
    latent, turned = load_latents(latents_ptr, table_ptr, position, position < start, R, DR, P, HAS_TABLE, SLABS, BR, BDR)
    depend(PDL)
    end = start + T
    if begin < end:
        if begin + TILE > start:
            latent, turned = load_latents(latents_ptr, table_ptr, position, position < end, R, DR, P, HAS_TABLE, SLABS, BR, BDR)
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        of_row = row < T * H
        r = (tl.arange(0, SLABS) * BR)[:, None, None] + tl.arange(0, BR)[None, None, :]
        d = tl.arange(0, BDR)[None, :]
        q_at = q_ptr + row * (R + DR)
        q = tl.load(q_at[None, :, None] + r, mask=of_row[None, :, None] & (r < R), other=0.0)
        q_turned = tl.load(q_at[:, None] + R + d, mask=of_row[:, None] & (d < DR), other=0.0)
        last = start + row // H
        m = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((SLABS, ROWS, BR), tl.float32)
        m, total, acc = step(q, q_turned, latent, turned, scale, position[None, :] <= last[:, None], m, total, acc)
        for tile in range(TILE, tl.minimum(run_size(run), end - begin), TILE):
            here = position + tile
            latent, turned = load_latents(latents_ptr, table_ptr, here, here < end, R, DR, P, HAS_TABLE, SLABS, BR, BDR)
            m, total, acc = step(q, q_turned, latent, turned, scale, here[None, :] <= last[:, None], m, total, acc)
        logs, divisor = log_weight(m, total)
        at = run.to(tl.int64) * T * H + row
        tl.store(logs_ptr + at, logs, mask=of_row)
        out = (acc / divisor[None, :, None]).to(parts_ptr.dtype.element_ty)
        tl.store(parts_ptr + at[None, :, None] * R + r, out, mask=of_row[None, :, None] & (r < R))


@triton.jit(do_not_specialize=["T"])
def project_kernel(
    parts_ptr, logs_ptr, up_value_ptr, gate_ptr, gate_row, start_ptr, out_ptr, T, H, R, DV, up_head,
    BR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (head, chunk of value channels, window row): out [T, H * DV]."""
    head = tl.program_id(0)
    t = tl.program_id(2)
    v = tl.program_id(1) * PROJECTED + tl.arange(0, PROJECTED)
    r = tl.arange(0, BR)
    inside = (v < DV)[:, None] & (r < R)[None, :]
    weight = tl.load(up_value_ptr + head * up_head + v[:, None] * R + r[None, :], mask=inside, other=0.0)
    position = tl.load(start_ptr).to(tl.int32) + t
    gate = tl.load(gate_ptr + t * gate_row + head).to(tl.float32)
    depend(PDL)
    context = join_runs(parts_ptr, logs_ptr, t * H + head, T * H, position, R, BR).to(weight.dtype).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    out = tl.sum(weight.to(tl.float32) * context[None, :], 1).to(dtype).to(tl.float32)
    opened = (1.0 / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + (t * H + head) * DV + v, (out * opened).to(dtype), mask=v < DV)


@mla_round.impl("triton", on="cuda")
def _triton(
    q: torch.Tensor,
    kv: torch.Tensor,
    gate: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    up_key: torch.Tensor,
    up_value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    latents: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
    table: torch.Tensor | None,
    start: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    T, (H, R, N), DV = q.shape[0], up_key.shape, up_value.shape[1]
    pages, _, P, width = latents.shape
    DR = width - R
    assert q.stride(2) == kv.stride(1) == gate.stride(1) == 1, (q.stride(), kv.stride(), gate.stride())
    assert up_key.is_contiguous() and up_value.stride()[1:] == (R, 1) and latents.is_contiguous()
    device, BR = q.device, max(next_power_of_2(R), 16)
    queries, slabs = q.new_empty(T, H, width), min(8, BR // 16)
    chunks = triton.cdiv(R, ABSORBED.value)
    launch(absorb_kernel, (H * chunks + T,), q, q.stride(0), q.stride(1), kv, kv.stride(0), norm_weight, eps, up_key,
           cos.contiguous(), sin.contiguous(), latents, page, offset, queries, T, H, R, N, DR, P, device=device,
           STEP=2 if interleaved else 1, BN=max(next_power_of_2(N), 16), BR=BR, BH=next_power_of_2(H),
           BHALF=next_power_of_2(DR // 2), num_warps=4, num_stages=1)  # fmt: skip
    runs = num_runs((pages if table is None else table.shape[0]) * P)
    parts, logs = q.new_empty(runs, T * H, R), q.new_empty(runs, T * H, dtype=torch.float32)
    launch(attend_kernel, (runs, triton.cdiv(T * H, ROWS.value)), queries, latents, start if table is None else table, start,
           parts, logs, scale * math.log2(math.e), T, H, R, DR, device=device, P=P, HAS_TABLE=table is not None,
           SLABS=slabs, BR=BR // slabs, BDR=max(next_power_of_2(DR), 16), num_warps=8, num_stages=1, maxnreg=192)  # fmt: skip
    out = q.new_empty(T, H * DV)
    launch(project_kernel, (H, triton.cdiv(DV, PROJECTED.value), T), parts, logs, up_value, gate, gate.stride(0), start, out,
           T, H, R, DV, up_value.stride(0), device=device, BR=BR, num_warps=16)  # fmt: skip
    return out
