"""MLA of a long window: the rows' cache entries, keys and values expanded by the library, one attention kernel.

The attention reads the turned keys, which all heads share, where the cache holds them, turns its own queries, and ends with
the head's gate: nothing is padded to one width, concatenated or repeated.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from soloist.ops.gpu.attention import turn, weigh
from soloist.ops.gpu.launch import depend, has_pdl, launch, next_power_of_2
from soloist.ops.gpu.mla import load_turned
from soloist.ops.mla import mla_prefill

HOPPER = {"BM": 128, "BS": 64, "num_warps": 8, "num_stages": 3}
"""Query rows of a program, keys of a step."""
SMALL = {"BM": 64, "BS": 32, "num_warps": 4, "num_stages": 2}
"""For less shared memory, and for fp32."""


@triton.jit
def entry_kernel(
    kv_ptr, kv_row, weight_ptr, eps, cos_ptr, sin_ptr, latents_ptr, page_ptr, offset_ptr, R, DR, P,
    STEP: tl.constexpr, BR: tl.constexpr, BHALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (window row): its normed latent and turned key, where the cache keeps them."""
    t = tl.program_id(0).to(tl.int64)
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


@triton.jit
def turned_queries(q_at, t, inside, cos_ptr, sin_ptr, half, STEP: tl.constexpr, BHALF: tl.constexpr):
    """The turned channels of queries, fp32, in the order of `turned_channels`: [rows, 2 * BHALF]."""
    i = tl.arange(0, BHALF)
    mask = inside[:, None] & (i < half)[None, :]
    one = q_at[:, None] + (i * STEP)[None, :]
    first = tl.load(one, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(one + (1 if STEP == 2 else half), mask=mask, other=0.0).to(tl.float32)
    at = t[:, None] * half + i[None, :]
    first, second = turn(first, second, tl.load(cos_ptr + at, mask=mask, other=0.0), tl.load(sin_ptr + at, mask=mask, other=0.0))
    both = tl.join(first, second)  # [rows, BHALF, 2]
    if STEP == 1:
        both = tl.permute(both, (0, 2, 1))
    return tl.reshape(both, (first.shape[0], 2 * BHALF))


@triton.jit
def turned_channels(half, STEP: tl.constexpr, BHALF: tl.constexpr):
    """(channel, whether there is one) of each place in a padded row of turned channels."""
    c = tl.arange(0, 2 * BHALF)
    if STEP == 2:
        return c, c < 2 * half
    return c // BHALF * half + c % BHALF, c % BHALF < half


@triton.jit
def step(
    q, q_turned, keys_ptr, key_row, turned_ptr, entry_row, values_ptr, value_row, s, position, end, scale, N, DV, half, m, total,
    acc, MASKED: tl.constexpr, STEP: tl.constexpr, BN: tl.constexpr, BHALF: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Take the keys s [BS] in; MASKED: not every row sees all of them. `weigh` is the softmax."""
    n = tl.arange(0, BN)
    v = tl.arange(0, BV)
    c, real = turned_channels(half, STEP, BHALF)
    row = s.to(tl.int64)
    if MASKED:
        here = s < end
    else:
        here = s >= 0
    keys = tl.load(keys_ptr + row[None, :] * key_row + n[:, None], mask=here[None, :] & (n < N)[:, None], other=0.0)
    turned = tl.load(turned_ptr + row[None, :] * entry_row + c[:, None], mask=here[None, :] & real[:, None], other=0.0)
    scores = tl.dot(q, keys, input_precision="tf32x3")
    scores = tl.dot(q_turned, turned, scores, input_precision="tf32x3") * scale
    visible = (s[None, :] <= position[:, None]) if MASKED else (s >= 0)[None, :]
    weights, keep, m, total = weigh(scores, visible, m, total)
    values = tl.load(values_ptr + row[:, None] * value_row + v[None, :], mask=here[:, None] & (v < DV)[None, :], other=0.0)
    acc = tl.dot(weights.to(values.dtype), values, acc * keep[:, None], input_precision="tf32x3")
    return m, total, acc


@triton.jit(do_not_specialize=["T", "start"])
def attention_kernel(
    q_ptr, q_row, q_head, keys_ptr, key_head, key_row, values_ptr, value_head, value_row, latents_ptr, gate_ptr, gate_row,
    cos_ptr, sin_ptr, out_ptr, T, start, H, N, R, DR, DV, scale, STEP: tl.constexpr, BN: tl.constexpr, BHALF: tl.constexpr,
    BV: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (head, block of rows, the last first, since it has most to read): out [T, H * DV]."""
    head = tl.program_id(0)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BM
    t = first + tl.arange(0, BM)
    inside = t < T
    n = tl.arange(0, BN)
    v = tl.arange(0, BV)
    half = DR // 2
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    depend(PDL)
    q_at = q_ptr + t.to(tl.int64) * q_row + head * q_head
    q = tl.load(q_at[:, None] + n[None, :], mask=inside[:, None] & (n < N)[None, :], other=0.0)
    q_turned = turned_queries(q_at + N, t, inside, cos_ptr, sin_ptr, half, STEP, BHALF).to(dtype)
    keys = keys_ptr + head.to(tl.int64) * key_head
    values = values_ptr + head.to(tl.int64) * value_head
    position = start + t
    end = start + tl.minimum(T, first + BM)
    whole = (start + first + 1) // BS * BS
    m = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BV), tl.float32)
    for s in range(0, whole, BS):
        m, total, acc = step(q, q_turned, keys, key_row, latents_ptr + R, R + DR, values, value_row, s + tl.arange(0, BS),
                             position, end, scale, N, DV, half, m, total, acc, False, STEP, BN, BHALF, BV)  # fmt: skip
    for s in range(whole, end, BS):
        m, total, acc = step(q, q_turned, keys, key_row, latents_ptr + R, R + DR, values, value_row, s + tl.arange(0, BS),
                             position, end, scale, N, DV, half, m, total, acc, True, STEP, BN, BHALF, BV)  # fmt: skip
    gate = tl.load(gate_ptr + t.to(tl.int64) * gate_row + head, mask=inside, other=0.0).to(tl.float32)
    opened = (1.0 / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    out = (acc / total[:, None]).to(dtype).to(tl.float32) * opened[:, None]
    at = out_ptr + (t.to(tl.int64) * H + head)[:, None] * DV + v[None, :]
    tl.store(at, out.to(dtype), mask=inside[:, None] & (v < DV)[None, :])


@mla_prefill.impl("triton", on="cuda")
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
    start: int,
    scale: float,
) -> torch.Tensor:
    T, (H, R, N), DV, device = q.shape[0], up_key.shape, up_value.shape[1], q.device
    wide = has_pdl(device)
    if table is not None or (device.type == "cuda" and q.element_size() > 2 and not wide):
        return mla_prefill.reference(q, kv, gate, norm_weight, eps, up_key, up_value, cos, sin, interleaved, latents, page,
                                     offset, table, start, scale)  # fmt: skip
    P, width = latents.shape[2:]
    DR = width - R
    assert q.stride(2) == kv.stride(1) == gate.stride(1) == 1, (q.stride(), kv.stride(), gate.stride())
    assert latents.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    turning = {"STEP": 2 if interleaved else 1, "BHALF": max(next_power_of_2(DR // 2), 8)}
    launch(entry_kernel, (T,), kv, kv.stride(0), norm_weight, eps, cos, sin, latents, page, offset, R, DR, P,
           BR=next_power_of_2(R), device=device, num_warps=4, **turning)  # fmt: skip
    context = latents.view(-1, width)[: start + T, :R]
    keys, values = (torch.einsum("sr,hrn->shn", context, up) for up in (up_key, up_value.transpose(1, 2)))
    assert keys.stride(2) == values.stride(2) == 1, (keys.stride(), values.stride())
    tiles = HOPPER if wide and q.element_size() == 2 else SMALL
    out = q.new_empty(T, H * DV)
    launch(attention_kernel, (H, triton.cdiv(T, tiles["BM"])), q, q.stride(0), q.stride(1), keys, keys.stride(1),
           keys.stride(0), values, values.stride(1), values.stride(0), latents, gate, gate.stride(0), cos, sin, out, T, start,
           H, N, R, DR, DV, scale * math.log2(math.e), BN=max(next_power_of_2(N), 16), BV=max(next_power_of_2(DV), 16),
           device=device, **turning, **tiles)  # fmt: skip
    return out
