"""The choice of the verify width in one program, and the chance of a row's best token in two small kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.choose_width import choose_width
from soloist.ops.gpu.launch import depend, launch, next_power_of_2
from soloist.ops.top_chance import top_chance

CHUNK = 2048


@triton.jit
def choose_kernel(
    confidence_ptr, factors_ptr, costs_ptr, saved_ptr, rows_ptr, W, WIDTHS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Lane w stands for verifying w drafts."""
    w = tl.arange(0, WIDTHS)
    draft = (w > 0) & (w <= W)
    depend(PDL)
    chance = tl.load(confidence_ptr + w - 1, mask=draft, other=1.0) * tl.load(factors_ptr + w - 1, mask=draft, other=1.0)
    tokens = tl.cumsum(tl.cumprod(tl.minimum(chance, 1.0), 0), 0)
    cost = tl.load(costs_ptr + w, mask=w <= W, other=1.0)
    widest = tl.load(costs_ptr + W)
    value = tokens / (widest - tl.load(saved_ptr) * (widest - cost))
    value = tl.where(w <= W, value, float("-inf"))
    tl.store(rows_ptr, tl.max(tl.where(value == tl.max(value, 0), w, 0), 0).to(tl.int64) + 1)


@choose_width.impl("triton", on="cuda")
def _choose_width(
    confidence: torch.Tensor, factors: torch.Tensor, costs: torch.Tensor, saved: torch.Tensor, width: int
) -> torch.Tensor:
    rows = torch.empty(1, dtype=torch.int64, device=costs.device)
    launch(choose_kernel, (1,), confidence, factors, costs, saved, rows, width, WIDTHS=next_power_of_2(width + 1),
           device=costs.device, num_warps=1)  # fmt: skip
    return rows


@triton.jit
def peak_kernel(logits_ptr, peak_ptr, sum_ptr, V, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Program (c, t): the largest logit of row t's chunk c, and the sum of exponentials below it; [T, C] fp32 each."""
    c = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    token = c * CHUNK + tl.arange(0, CHUNK)
    depend(PDL)
    x = tl.load(logits_ptr + t * V + token, mask=token < V, other=float("-inf"))
    peak = tl.max(x, 0)
    out = t * tl.num_programs(0) + c
    tl.store(peak_ptr + out, peak)
    tl.store(sum_ptr + out, tl.sum(tl.where(token < V, tl.exp(x - tl.maximum(peak, -3e38)), 0.0), 0))


@triton.jit
def chance_kernel(peak_ptr, sum_ptr, chance_ptr, C, CHUNKS: tl.constexpr, PDL: tl.constexpr):
    t = tl.program_id(0)
    c = tl.arange(0, CHUNKS)
    depend(PDL)
    peak = tl.load(peak_ptr + t * C + c, mask=c < C, other=float("-inf"))
    share = tl.load(sum_ptr + t * C + c, mask=c < C, other=0.0) * tl.exp(peak - tl.max(peak, 0))
    tl.store(chance_ptr + t, 1.0 / tl.sum(share, 0))


@top_chance.impl("triton", on="cuda")
def _top_chance(logits: torch.Tensor) -> torch.Tensor:
    T, V = logits.shape
    C = triton.cdiv(V, CHUNK)
    peak, total = torch.empty((2, T, C), dtype=torch.float32, device=logits.device).unbind()
    chance = torch.empty(T, dtype=torch.float32, device=logits.device)
    launch(peak_kernel, (C, T), logits.contiguous(), peak, total, V, CHUNK=CHUNK, device=logits.device, num_warps=4)
    launch(chance_kernel, (T,), peak, total, chance, C, CHUNKS=next_power_of_2(C), device=logits.device, num_warps=1)
    return chance
