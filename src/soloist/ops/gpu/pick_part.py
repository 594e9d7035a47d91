"""The best of a rank's columns, and of all ranks' bests: the second stages of picking from a shared vocabulary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.gpu.launch import depend, launch, next_power_of_2
from soloist.ops.gpu.pick import best_of_chunks
from soloist.ops.pick import Noise
from soloist.ops.pick_part import pick_best, pick_part


@triton.jit
def part_kernel(
    best_ptr, token_ptr, temperature_ptr, part_ptr, C, first, NOISY: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program t: from what `best_kernel` left of row t, its [3] of `pick_part`."""
    t = tl.program_id(0)
    c = tl.arange(0, CHUNKS)
    inside = c < C
    depend(PDL)
    x = tl.load(best_ptr + t * C + c, mask=inside, other=float("-inf"))
    token = tl.load(token_ptr + t * C + c, mask=inside, other=2147483647)
    top = tl.max(x, 0)
    if NOISY:
        peak = tl.load(best_ptr + (tl.num_programs(0) + t) * C + c, mask=inside, other=float("-inf"))
        top = tl.max(peak, 0)
        x = x + (peak - top) / tl.load(temperature_ptr)
        x = tl.where(inside, x, float("-inf"))
    best = tl.max(x, 0)
    winner = tl.min(tl.where(x == best, token, 2147483647), 0)
    tl.store(part_ptr + t * 3, best)
    tl.store(part_ptr + t * 3 + 1, top)
    tl.store(part_ptr + t * 3 + 2, (winner + first).to(tl.float32))


@pick_part.impl("triton", on="cuda")
def _pick_part(scores: torch.Tensor, places: torch.Tensor, noise: Noise | None, first: int) -> torch.Tensor:
    best, token = best_of_chunks(scores, places, noise, 0, first)
    T, C = token.shape
    part = torch.empty((T, 3), dtype=torch.float32, device=scores.device)
    launch(part_kernel, (T,), best, token, scores if noise is None else noise[0], part, C, first,
           NOISY=noise is not None, CHUNKS=next_power_of_2(C), device=scores.device, num_warps=4)  # fmt: skip
    return part


@triton.jit
def pick_best_kernel(
    parts_ptr, temperature_ptr, picks_ptr, T, R, NOISY: tl.constexpr, RANKS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0)
    rank = tl.arange(0, RANKS)
    inside = rank < R
    at = (rank * T + t) * 3
    depend(PDL)
    x = tl.load(parts_ptr + at, mask=inside, other=float("-inf"))
    token = tl.load(parts_ptr + at + 2, mask=inside, other=0.0).to(tl.int64)
    if NOISY:
        peak = tl.load(parts_ptr + at + 1, mask=inside, other=float("-inf"))
        x = x + (peak - tl.max(peak, 0)) / tl.load(temperature_ptr)
        x = tl.where(inside, x, float("-inf"))
    first = tl.min(tl.where(x == tl.max(x, 0), rank, RANKS - 1), 0)
    tl.store(picks_ptr + t, tl.sum(tl.where(rank == first, token, 0), 0))


@pick_best.impl("triton", on="cuda")
def _pick_best(parts: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    R, T, _ = parts.shape
    picks = torch.empty(T, dtype=torch.int64, device=parts.device)
    launch(pick_best_kernel, (T,), parts, parts if temperature is None else temperature, picks, T, R,
           NOISY=temperature is not None, RANKS=next_power_of_2(R), device=parts.device, num_warps=1)  # fmt: skip
    return picks
