"""KDA of a long window in four kernels: rows, chunks, a walk over the chunks, outputs. Only the walk is sequential.

Per chunk of 64 tokens and head, with S the state before it (see `prepare_chunks` of the reference):

    delta = U - W S;  o = read S + attention delta;  S <- diag(keep) S + write^T delta.

The walk does the least that it can: it leaves S and delta of every chunk, and the outputs follow from them side by side.
Decays are exponentials of sums over a block of 16 tokens, times those of whole blocks, so that none exceeds exp(80) and
none comes of a difference of large sums. bf16 models multiply in bf16 with fp32 sums; in others three
products of rounded halves make up for the ten bits of the tensor cores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.gpu.kda import CONV_WIDTH
from soloist.ops.gpu.launch import depend, has_pdl, launch, next_power_of_2
from soloist.ops.kda import kda_prefill
from soloist.ops.kda_chunk import BLOCK, CHUNK

C = tl.constexpr(CHUNK)
B = tl.constexpr(BLOCK)
BLOCKS = tl.constexpr(CHUNK // BLOCK)
LEVELS = tl.constexpr(CHUNK.bit_length() - 1)
TAPS = tl.constexpr(CONV_WIDTH)
WALK_V = 16
"""Value channels of a program that walks: with few, more programs share the work."""


@triton.jit
def product(a, b, dtype: tl.constexpr):
    """a b with fp32 sums, of factors in that dtype."""
    return tl.dot(a.to(dtype), b.to(dtype), input_precision="tf32x3")


@triton.jit
def convolved(x_ptr, x_stride, weight_ptr, history_ptr, channel, of_channel, t, T, start, channels, R):
    """SiLU of the causal convolution at rows t of the window, rounded as the input is, fp32; 0 behind the window."""
    y = tl.zeros((t.shape[0], channel.shape[0]), tl.float32)
    for i in tl.static_range(TAPS):
        row = t - (TAPS - 1) + i
        tap = tl.load(weight_ptr + channel * TAPS + i, mask=of_channel, other=0.0)
        inside = ((row >= 0) & (t < T))[:, None] & of_channel[None, :]
        x = tl.load(x_ptr + row.to(tl.int64)[:, None] * x_stride + channel[None, :], mask=inside, other=0.0)
        before = (row < 0)[:, None] & of_channel[None, :]
        past = tl.load(history_ptr + ((start + row + R) % R)[:, None] * channels + channel[None, :], mask=before, other=0.0)
        y += (x + past).to(tl.float32) * tap[None, :]
    y = y / (1.0 + tl.exp(-y))
    return tl.where((t < T)[:, None], y.to(x_ptr.dtype.element_ty).to(tl.float32), 0.0)


@triton.jit
def unit(x):
    """Rows of length one."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit(do_not_specialize=["T"])
def rows_kernel(
    x_ptr, weight_ptr, rate_ptr, bias_ptr, history_ptr, start_ptr, q_ptr, k_ptr, back_ptr, out_ptr, v_ptr, decay_ptr,
    T, H, D, R, x_stride, lower_bound, q_scale, DP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of 16 tokens, head): q, k, back, out, v [N, H, C, D]; decay [blocks, H, D] fp32 of the whole block.

    With c_i the log decay from the block's beginning to token i: q_i exp(c_i), beta_i k_i exp(c_i), k_i exp(-c_i), k_i
    decayed to the block's end, beta_i v_i. Rows behind the window are zero and decay nothing.
    """
    block, head = tl.program_id(0), tl.program_id(1)
    A = H * D
    i = tl.arange(0, B)
    t = block * B + i
    d = tl.arange(0, DP)
    of_d = d < D
    channel = head * D + d
    rate = tl.load(rate_ptr + head)
    bias = tl.load(bias_ptr + channel, mask=of_d, other=0.0)
    depend(PDL)
    start = tl.load(start_ptr)

    row = t.to(tl.int64) * x_stride
    here = (t < T)[:, None] & of_d[None, :]
    f = tl.load(x_ptr + row[:, None] + 3 * A + channel[None, :], mask=here, other=0.0).to(tl.float32)
    gate = tl.where(here, lower_bound / (1.0 + tl.exp(-(f + bias[None, :]) * rate)), 0.0)
    log_decay = tl.cumsum(gate, 0)
    total = tl.sum(gate, 0)
    decay = tl.exp(log_decay)
    tl.store(decay_ptr + (block * H + head) * D + d, tl.exp(total), mask=of_d)

    n = block // BLOCKS
    at = (n * H + head).to(tl.int64) * C * D + (block % BLOCKS * B + i)[:, None] * D + d[None, :]
    mask = of_d[None, :] & (i >= 0)[:, None]
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    beta = 1.0 / (1.0 + tl.exp(-tl.load(x_ptr + row + 5 * A + head, mask=t < T, other=0.0).to(tl.float32)))
    k = unit(convolved(x_ptr, x_stride, weight_ptr, history_ptr, A + channel, of_d, t, T, start, 3 * A, R))
    tl.store(k_ptr + at, (beta[:, None] * k * decay).to(dtype), mask=mask)
    tl.store(back_ptr + at, (k * tl.exp(-log_decay)).to(dtype), mask=mask)
    tl.store(out_ptr + at, (k * tl.exp(total[None, :] - log_decay)).to(dtype), mask=mask)
    v = convolved(x_ptr, x_stride, weight_ptr, history_ptr, 2 * A + channel, of_d, t, T, start, 3 * A, R)
    tl.store(v_ptr + at, (beta[:, None] * v).to(dtype), mask=mask)
    q = unit(convolved(x_ptr, x_stride, weight_ptr, history_ptr, channel, of_d, t, T, start, 3 * A, R)) * q_scale
    tl.store(q_ptr + at, (q * decay).to(dtype), mask=mask)


@triton.jit
def load_decay(decay_ptr, n, head, H, d, D, b: tl.constexpr):
    """The decay [DP] of block b of chunk n."""
    return tl.load(decay_ptr + ((n * BLOCKS + b) * H + head) * D + d, mask=d < D, other=1.0)


@triton.jit
def of_blocks(first, second, third, fourth):
    """A row [DP] of every block, at all rows of the block: [C, DP]."""
    block = (tl.arange(0, C) // B)[:, None]
    early = tl.where(block == 0, first[None, :], second[None, :])
    return tl.where(block < 2, early, tl.where(block == 2, third[None, :], fourth[None, :]))


@triton.jit
def decayed_products(rows, back, out, one, second, third, dtype: tl.constexpr):
    """sum_d x_i[d] k_j[d] exp(G_i[d] - G_j[d]) for j <= i, else 0: [C, C] fp32.

    rows: x_i from the beginning of its block; back and out: see `rows_kernel`; one, second, third [DP]: 1, and the decays
    of the blocks in the middle. Done within blocks, within pairs of blocks, and from one half of the chunk to the other.
    """
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    near = product(rows, tl.trans(back), dtype)
    result = tl.where((i // B == j // B) & (j <= i), near, 0.0)
    pairs = product(rows, tl.trans(out), dtype)
    result += tl.where((i // (2 * B) == j // (2 * B)) & (i // B > j // B), pairs, 0.0)
    far = product(rows * of_blocks(one, one, one, third), tl.trans(out * of_blocks(second, one, one, one)), dtype)
    return result + tl.where(i // (2 * B) > j // (2 * B), far, 0.0)


@triton.jit
def inverse(lower, PRECISION: tl.constexpr):
    """(1 + lower)^-1 of a strictly lower triangle [C, C]: the inverses of two neighbours on the diagonal make that of both.

    [[A, 0], [L, D]] -> [[1/A, 0], [-1/D L 1/A, 1/D]], from single entries up.
    """
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    result = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, lower, 0.0)
    for level in tl.static_range(1, LEVELS):
        across = (i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level)
        right = tl.dot(tl.where(across, lower, 0.0), result, input_precision=PRECISION)
        result -= tl.dot(result, right, input_precision=PRECISION)
    return result


@triton.jit
def chunks_kernel(
    k_ptr, back_ptr, out_ptr, v_ptr, decay_ptr, u_ptr, w_ptr, write_ptr, keep_ptr, H, D, DP: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program (chunk, head): u, w, write [N, H, C, D], keep [N, H, D] fp32;"""
    n, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, C)[:, None]
    d = tl.arange(0, DP)
    part = (n * H + head).to(tl.int64)
    at = part * C * D + i * D + d[None, :]
    mask = (d < D)[None, :] & (i >= 0)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    depend(PDL)
    first, second = load_decay(decay_ptr, n, head, H, d, D, 0), load_decay(decay_ptr, n, head, H, d, D, 1)
    third, fourth = load_decay(decay_ptr, n, head, H, d, D, 2), load_decay(decay_ptr, n, head, H, d, D, 3)
    one = tl.full((DP,), 1.0, tl.float32)
    k = tl.load(k_ptr + at, mask=mask, other=0.0)
    back = tl.load(back_ptr + at, mask=mask, other=0.0)
    out = tl.load(out_ptr + at, mask=mask, other=0.0)
    overlap = decayed_products(k, back, out, one, second, third, dtype)
    solve = inverse(tl.where(i > tl.arange(0, C)[None, :], overlap, 0.0), "tf32x3" if dtype == tl.float32 else "tf32")
    w = product(solve, k * of_blocks(one, first, first * second, first * second * third), dtype)
    u = product(solve, tl.load(v_ptr + at, mask=mask, other=0.0), dtype)
    write = out * of_blocks(second * third * fourth, third * fourth, fourth, one)
    tl.store(w_ptr + at, w.to(dtype), mask=mask)
    tl.store(u_ptr + at, u.to(dtype), mask=mask)
    tl.store(write_ptr + at, write.to(dtype), mask=mask)
    tl.store(keep_ptr + part * D + d, first * second * third * fourth, mask=d < D)


@triton.jit(do_not_specialize=["T", "N"])
def walk_kernel(
    u_ptr, w_ptr, write_ptr, keep_ptr, x_ptr, history_ptr, states_ptr, start_ptr, live_ptr, before_ptr, delta_ptr,
    T, N, H, D, R, x_stride, DP: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (head, block of value channels): before [N, H, D, D] and delta [N, H, C, D]; from the live state to slot 0.

    Its channels' last conv inputs go to the history, which the first chunk has read by now.
    """
    head = tl.program_id(0)
    A = H * D
    c = tl.arange(0, C)
    k = tl.arange(0, DP)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    of_k = k < D
    of_v = v < D
    dtype: tl.constexpr = u_ptr.dtype.element_ty
    depend(PDL)
    start, live = tl.load(start_ptr), tl.load(live_ptr)
    for i in tl.static_range(1, TAPS):
        t = T - i
        if t >= 0:
            for stream in tl.static_range(3):
                channel = stream * A + head * D + v
                kept = tl.load(x_ptr + t.to(tl.int64) * x_stride + channel, mask=of_v)
                tl.store(history_ptr + ((start + t) % R) * 3 * A + channel, kept, mask=of_v)

    cell = k[:, None] * D + v[None, :]
    of_cell = of_k[:, None] & of_v[None, :]
    state = tl.load(states_ptr + (live * H + head) * D * D + cell, mask=of_cell, other=0.0)
    by_k = c[:, None] * D + k[None, :]
    by_v = c[:, None] * D + v[None, :]
    for n in tl.range(0, N, num_stages=STAGES):
        part = (n * H + head).to(tl.int64)
        w = tl.load(w_ptr + part * C * D + by_k, mask=of_k[None, :], other=0.0)
        u = tl.load(u_ptr + part * C * D + by_v, mask=of_v[None, :], other=0.0)
        write = tl.load(write_ptr + part * C * D + by_k, mask=of_k[None, :], other=0.0)
        keep = tl.load(keep_ptr + part * D + k, mask=of_k, other=0.0)
        tl.store(before_ptr + part * D * D + cell, state.to(dtype), mask=of_cell)
        delta = (u.to(tl.float32) - product(w, state, dtype)).to(dtype)
        tl.store(delta_ptr + part * C * D + by_v, delta, mask=of_v[None, :])
        state = state * keep[:, None] + product(tl.trans(write), delta, dtype)
    tl.store(states_ptr + head * D * D + cell, state, mask=of_cell)


@triton.jit(do_not_specialize=["T"])
def output_kernel(
    q_ptr, back_ptr, out_ptr, decay_ptr, before_ptr, delta_ptr, o_ptr, T, H, D, DP: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program (chunk, head): o [T, H, D] fp32."""
    n, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, C)[:, None]
    d = tl.arange(0, DP)
    part = (n * H + head).to(tl.int64)
    at = part * C * D + i * D + d[None, :]
    mask = (d < D)[None, :] & (i >= 0)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    depend(PDL)
    first, second = load_decay(decay_ptr, n, head, H, d, D, 0), load_decay(decay_ptr, n, head, H, d, D, 1)
    third = load_decay(decay_ptr, n, head, H, d, D, 2)
    one = tl.full((DP,), 1.0, tl.float32)
    q = tl.load(q_ptr + at, mask=mask, other=0.0)
    back = tl.load(back_ptr + at, mask=mask, other=0.0)
    out = tl.load(out_ptr + at, mask=mask, other=0.0)
    attention = decayed_products(q, back, out, one, second, third, dtype)
    delta = tl.load(delta_ptr + at, mask=mask, other=0.0)
    o = product(attention, delta, dtype)
    cell = part * D * D + d[:, None] * D + d[None, :]
    before = tl.load(before_ptr + cell, mask=(d < D)[:, None] & (d < D)[None, :], other=0.0)
    o += product(q * of_blocks(one, first, first * second, first * second * third), before, dtype)
    t = n * C + i
    tl.store(o_ptr + (t.to(tl.int64) * H + head) * D + d[None, :], o, mask=(t < T) & mask)


@kda_prefill.impl("triton", on="cuda")
def _kda_prefill(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    rate: torch.Tensor,
    bias: torch.Tensor,
    lower_bound: float,
    history: torch.Tensor,
    states: torch.Tensor,
    start: torch.Tensor,
    live: torch.Tensor,
) -> torch.Tensor:
    (H, D), T, device = bias.shape, projected.shape[0], projected.device
    assert conv_weight.shape[1] == CONV_WIDTH and projected.stride(1) == 1, (conv_weight.shape, projected.stride())
    N, DP, R, stride = triton.cdiv(T, CHUNK), max(next_power_of_2(D), 16), history.shape[0], projected.stride(0)
    # fp16 has no room for exp(80).
    narrow = projected.dtype == torch.bfloat16
    dtype, hopper = torch.bfloat16 if narrow else torch.float32, has_pdl(device)
    if device.type == "cuda" and not (narrow or hopper):  # fp32 tiles need the shared memory of Hopper
        return kda_prefill.reference(projected, conv_weight, rate, bias, lower_bound, history, states, start, live)
    warps = 4 if narrow and hopper else 8

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    q, k, back, out, v, w, u, write, delta = empty(9, N, H, CHUNK, D, dtype=dtype).unbind()
    decay, keep, before = empty(N * BLOCKS.value, H, D), empty(N, H, D), empty(N, H, D, D, dtype=dtype)
    o = empty(T, H, D)
    launch(rows_kernel, (N * BLOCKS.value, H), projected, conv_weight, rate, bias, history, start, q, k, back, out, v, decay, T,
           H, D, R, stride, lower_bound, D**-0.5, DP=DP, device=device, num_warps=4, num_stages=1)  # fmt: skip
    launch(chunks_kernel, (N, H), k, back, out, v, decay, u, w, write, keep, H, D, DP=DP, device=device, num_warps=warps,
           num_stages=1)  # fmt: skip
    launch(walk_kernel, (H, triton.cdiv(D, WALK_V)), u, w, write, keep, projected, history, states, start, live, before, delta,
           T, N, H, D, R, stride, DP=DP, BV=WALK_V, STAGES=3 if narrow else 1, device=device, num_warps=4)  # fmt: skip
    launch(output_kernel, (N, H), q, back, out, decay, before, delta, o, T, H, D, DP=DP, device=device, num_warps=warps,
           num_stages=1)  # fmt: skip
    return o
