"""The gated delta rule over a long stretch: torch prepares all chunks at once, one kernel walks over them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.gpu.launch import depend, launch, next_power_of_2
from soloist.ops.kda_chunk import CHUNK, kda_chunk, prepare_chunks


@triton.jit
def product(a, b):
    """a b in fp32; on tensor cores, three products of rounded halves make up for their ten bits."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit(do_not_specialize=["N"])
def walk_kernel(
    u_ptr, w_ptr, read_ptr, attention_ptr, write_ptr, keep_ptr, state_ptr, out_ptr, N, H, DK, DV,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (head, block of value channels): out [N, H, C, DV]; state [H, DK, DV] from before the first chunk to after the
    last."""
    head = tl.program_id(0)
    c = tl.arange(0, C)
    k = tl.arange(0, BK)
    v = tl.program_id(1) * BV + tl.arange(0, BV)
    of_k = k < DK
    of_v = v < DV
    depend(PDL)
    state_at = state_ptr + (head * DK + k[:, None]) * DV + v[None, :]
    state_mask = of_k[:, None] & of_v[None, :]
    state = tl.load(state_at, mask=state_mask, other=0.0)
    for n in range(0, N):
        part = (n * H + head).to(tl.int64)
        by_k = part * C * DK + c[:, None] * DK + k[None, :]
        by_v = part * C * DV + c[:, None] * DV + v[None, :]
        w = tl.load(w_ptr + by_k, mask=of_k[None, :], other=0.0)
        delta = tl.load(u_ptr + by_v, mask=of_v[None, :], other=0.0) - product(w, state)
        read = tl.load(read_ptr + by_k, mask=of_k[None, :], other=0.0)
        attention = tl.load(attention_ptr + part * C * C + c[:, None] * C + c[None, :])
        tl.store(out_ptr + by_v, product(read, state) + product(attention, delta), mask=of_v[None, :])
        write = tl.load(write_ptr + by_k, mask=of_k[None, :], other=0.0)
        keep = tl.load(keep_ptr + part * DK + k, mask=of_k, other=0.0)
        state = state * keep[:, None] + product(tl.trans(write), delta)
    tl.store(state_at, state, mask=state_mask)


@kda_chunk.impl("triton", on="cuda")
def _triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    live: torch.Tensor,
) -> torch.Tensor:
    T, H, DK = q.shape
    DV = v.shape[2]
    parts = [part.contiguous() for part in prepare_chunks(q, k, v, g, beta)]
    state = states.index_select(0, live)[0]
    out = torch.empty_like(parts[0])
    BV = min(32, max(next_power_of_2(DV), 16))
    launch(walk_kernel, (H, triton.cdiv(DV, BV)), *parts, state, out, out.shape[0], H, DK, DV, device=q.device, C=CHUNK,
           BK=max(next_power_of_2(DK), 16), BV=BV, num_warps=8, num_stages=1)  # fmt: skip
    states[0] = state
    return out.transpose(1, 2).reshape(-1, H, DV)[:T]
