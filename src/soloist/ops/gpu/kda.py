"""KDA of a round in one kernel: a program owns some value channels of one head, its state stays in registers.

Every program of a head repeats the convolution and the norms of q and k, which is cheaper than a kernel boundary. The
state and the conv inputs of earlier rounds are loaded before `depend`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.gpu.launch import depend, launch, next_power_of_2
from soloist.ops.kda import kda_decode

CONV_WIDTH = 4
BLOCK_V = 16


@triton.jit
def load_past(history_ptr, start, back, channel, inside, C, R):
    """Conv inputs `back` positions before the window, as they were stored; rows before the sequence are zero there."""
    row = (start - back + R) % R
    return tl.load(history_ptr + row * C + channel, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def convolved(w0, w1, w2, w3, a, b, c, d):
    """SiLU of the taps' sum, oldest first."""
    y = a * w0 + b * w1 + c * w2 + d * w3
    return y / (1.0 + tl.exp(-y))


@triton.jit
def taps(weight_ptr, channel, inside, i):
    return tl.load(weight_ptr + channel * 4 + i, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["T"])
def kda_decode_kernel(
    x_ptr, weight_ptr, rate_ptr, bias_ptr, history_ptr, states_ptr, start_ptr, live_ptr, rows_ptr, o_ptr, T, H, D, R, slots,
    x_stride, lower_bound, q_scale, DP: tl.constexpr, BV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, block = tl.program_id(0), tl.program_id(1)
    A = H * D
    C = 3 * A
    k = tl.arange(0, DP)
    v = block * BV + tl.arange(0, BV)
    in_k, in_v = k < D, v < D
    cq = head * D + k
    ck = A + cq
    cv = 2 * A + head * D + v
    start, live = tl.load(start_ptr), tl.load(live_ptr)
    cell = k[:, None] * D + v[None, :]
    in_cell = in_k[:, None] & in_v[None, :]
    state = tl.load(states_ptr + (live * H + head) * D * D + cell, mask=in_cell, other=0.0)
    q1, q2, q3 = (load_past(history_ptr, start, 3, cq, in_k, C, R), load_past(history_ptr, start, 2, cq, in_k, C, R),
                  load_past(history_ptr, start, 1, cq, in_k, C, R))  # fmt: skip
    k1, k2, k3 = (load_past(history_ptr, start, 3, ck, in_k, C, R), load_past(history_ptr, start, 2, ck, in_k, C, R),
                  load_past(history_ptr, start, 1, ck, in_k, C, R))  # fmt: skip
    v1, v2, v3 = (load_past(history_ptr, start, 3, cv, in_v, C, R), load_past(history_ptr, start, 2, cv, in_v, C, R),
                  load_past(history_ptr, start, 1, cv, in_v, C, R))  # fmt: skip
    wq0, wq1, wq2, wq3 = (taps(weight_ptr, cq, in_k, 0), taps(weight_ptr, cq, in_k, 1), taps(weight_ptr, cq, in_k, 2),
                          taps(weight_ptr, cq, in_k, 3))  # fmt: skip
    wk0, wk1, wk2, wk3 = (taps(weight_ptr, ck, in_k, 0), taps(weight_ptr, ck, in_k, 1), taps(weight_ptr, ck, in_k, 2),
                          taps(weight_ptr, ck, in_k, 3))  # fmt: skip
    wv0, wv1, wv2, wv3 = (taps(weight_ptr, cv, in_v, 0), taps(weight_ptr, cv, in_v, 1), taps(weight_ptr, cv, in_v, 2),
                          taps(weight_ptr, cv, in_v, 3))  # fmt: skip
    rate = tl.load(rate_ptr + head)
    bias = tl.load(bias_ptr + cq, mask=in_k, other=0.0)
    depend(PDL)
    count = T if rows_ptr is None else tl.minimum(tl.load(rows_ptr).to(tl.int32), T)
    for t in range(count):
        x = x_ptr + t * x_stride
        raw_q, raw_k = tl.load(x + cq, mask=in_k, other=0.0), tl.load(x + ck, mask=in_k, other=0.0)
        raw_v = tl.load(x + cv, mask=in_v, other=0.0)
        f = tl.load(x + 3 * A + cq, mask=in_k, other=0.0).to(tl.float32)
        beta = 1.0 / (1.0 + tl.exp(-tl.load(x + 5 * A + head).to(tl.float32)))
        row = history_ptr + ((start + t) % R) * C
        tl.store(row + cq, raw_q, mask=in_k & (block == 0))
        tl.store(row + ck, raw_k, mask=in_k & (block == 0))
        tl.store(row + cv, raw_v, mask=in_v)
        q0, k0, v0 = raw_q.to(tl.float32), raw_k.to(tl.float32), raw_v.to(tl.float32)
        round_to = x_ptr.dtype.element_ty
        q = convolved(wq0, wq1, wq2, wq3, q1, q2, q3, q0).to(round_to).to(tl.float32)
        key = convolved(wk0, wk1, wk2, wk3, k1, k2, k3, k0).to(round_to).to(tl.float32)
        value = convolved(wv0, wv1, wv2, wv3, v1, v2, v3, v0).to(round_to).to(tl.float32)
        q1, q2, q3, k1, k2, k3, v1, v2, v3 = q2, q3, q0, k2, k3, k0, v2, v3, v0
        q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * q_scale
        key = key * tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
        decay = tl.exp(lower_bound / (1.0 + tl.exp(-(f + bias) * rate)))
        state = state * decay[:, None]
        error = (value - tl.sum(state * key[:, None], 0)) * beta
        state += key[:, None] * error[None, :]
        tl.store(o_ptr + (t * H + head) * D + v, tl.sum(state * q[:, None], 0), mask=in_v)
        slot = (live + 1 + t) % slots
        tl.store(states_ptr + (slot * H + head) * D * D + cell, state, mask=in_cell)


@kda_decode.impl("triton", on="cuda")
def _kda_decode(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    rate: torch.Tensor,
    bias: torch.Tensor,
    lower_bound: float,
    history: torch.Tensor,
    states: torch.Tensor,
    start: torch.Tensor,
    live: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    (H, D), T, slots = bias.shape, projected.shape[0], states.shape[0]
    assert conv_weight.shape[1] == CONV_WIDTH and T < slots, (conv_weight.shape, T, slots)
    o = torch.empty((T, H, D), dtype=torch.float32, device=projected.device)
    launch(
        kda_decode_kernel, (H, triton.cdiv(D, BLOCK_V)), projected, conv_weight, rate, bias, history, states, start, live, rows,
        o, T, H, D, history.shape[0], slots, projected.stride(0), lower_bound, D**-0.5, DP=next_power_of_2(D), BV=BLOCK_V,
        num_warps=4, device=projected.device,
    )  # fmt: skip
    return o
