"""Picking in two stages: the best token of every 1024, then the best of those, at the start of what follows.

Noise needs the row's largest score, which no program of the first stage knows. So each subtracts the largest of its own
chunk and leaves it beside the result, and the second stage makes up the difference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.gpu.launch import depend, launch, next_power_of_2
from soloist.ops.noise import gumbel
from soloist.ops.pick import Noise, pick

CHUNK = 1024
"""Fixed, so that neither the window's width nor the GPU changes a bit of a row."""


@triton.jit
def mix_rest(h):
    """Murmur3's finaliser behind its first shift, on uint32."""
    h = h * 0x85EBCA6B
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def mix(h):
    return mix_rest(h ^ (h >> 16))


@triton.jit
def noise_key(seed, place):
    """The key of a place's noise, uint32; seed and place int64. The seed's upper half is mixed with a carry, 33 bits."""
    upper = ((seed >> 32) & 0xFFFFFFFF) + 0x9E3779B1
    upper = mix_rest(((upper ^ (upper >> 16)) & 0xFFFFFFFF).to(tl.uint32))
    key = mix((seed & 0xFFFFFFFF).to(tl.uint32) ^ upper)
    return mix(key ^ mix(((place * 0x9E3779B1 + 1) & 0xFFFFFFFF).to(tl.uint32)))


@triton.jit
def noise_of(key, token):
    """Gumbel noise of token ids, fp32. log1p(-u) by Kahan's correction of log, exact to the last bits for small u."""
    bits = mix((token.to(tl.uint32) * 0x9E3779B1) ^ key)
    bits = mix(bits + key)
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    rest = 1.0 - u
    minus_log = tl.where(rest == 1.0, u, -tl.log(rest) * (u / (1.0 - rest)))
    return -tl.log(minus_log)


@triton.jit
def best_kernel(
    scores_ptr, place_ptr, temperature_ptr, seed_ptr, best_ptr, token_ptr, V, first,
    AHEAD: tl.constexpr, NOISY: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (c, t): of row t's chunk c the best score after noise, its token, and the largest score before noise.

    best [2, T, C] fp32: after noise, before; token [T, C] int32, the number of its column. Row t takes the place
    place[t] + AHEAD; column 0 is the token `first`.
    """
    c = tl.program_id(0)
    t = tl.program_id(1)
    out = t * tl.num_programs(0) + c
    token = c * CHUNK + tl.arange(0, CHUNK)
    depend(PDL)
    x = tl.load(scores_ptr + t * V + token, mask=token < V, other=float("-inf"))
    if NOISY:
        peak = tl.max(x, 0)
        key = noise_key(tl.load(seed_ptr), tl.load(place_ptr + t) + AHEAD)
        drawn = (x - peak) / tl.load(temperature_ptr) + noise_of(key, token + first)
        x = tl.where(x > float("-inf"), drawn, float("-inf"))
        tl.store(best_ptr + tl.num_programs(0) * tl.num_programs(1) + out, peak)
    best = tl.max(x, 0)
    tl.store(best_ptr + out, best)
    tl.store(token_ptr + out, tl.minimum(tl.min(tl.where(x == best, token, V), 0), V - 1))


@triton.jit
def best_tokens(
    best_ptr, token_ptr, temperature_ptr, t, T, C, V, NOISY: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """The picks [ROWS] int64 of the rows t [ROWS], from what `best_kernel` left."""
    c = tl.arange(0, CHUNKS)
    at = t[:, None] * C + c[None, :]
    inside = (t[:, None] < T) & (c[None, :] < C)
    x = tl.load(best_ptr + at, mask=inside, other=float("-inf"))
    if NOISY:
        peak = tl.load(best_ptr + T * C + at, mask=inside, other=float("-inf"))
        behind = (peak - tl.max(peak, 1)[:, None]) / tl.load(temperature_ptr)
        x = tl.where(x > float("-inf"), x + behind, float("-inf"))
    token = tl.load(token_ptr + at, mask=inside, other=V)
    best = tl.max(x, 1)
    return tl.minimum(tl.min(tl.where(x == best[:, None], token, V), 1), V - 1).to(tl.int64)


@triton.jit
def pick_kernel(
    best_ptr, token_ptr, temperature_ptr, picks_ptr, T, C, V, NOISY: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0) + tl.arange(0, 1)
    depend(PDL)
    tl.store(picks_ptr + t, best_tokens(best_ptr, token_ptr, temperature_ptr, t, T, C, V, NOISY, 1, CHUNKS))


def best_of_chunks(
    scores: torch.Tensor, places: torch.Tensor, noise: Noise | None, ahead: int, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first stage: (best [2, T, C] fp32, token [T, C] int32), see `best_kernel`."""
    T, V = scores.shape
    C = -(-V // CHUNK)
    best = torch.empty((2, T, C), dtype=torch.float32, device=scores.device)
    token = torch.empty((T, C), dtype=torch.int32, device=scores.device)
    temperature, seed = (scores, places) if noise is None else noise
    launch(best_kernel, (C, T), scores.contiguous(), places, temperature, seed, best, token, V, first,
           AHEAD=ahead, NOISY=noise is not None, CHUNK=CHUNK, device=scores.device, num_warps=4)  # fmt: skip
    return best, token


@pick.impl("triton", on="cuda")
def _pick(scores: torch.Tensor, places: torch.Tensor, noise: Noise | None) -> torch.Tensor:
    T, V = scores.shape
    best, token = best_of_chunks(scores, places, noise, 0)
    picks = torch.empty(T, dtype=torch.int64, device=scores.device)
    C = token.shape[1]
    launch(pick_kernel, (T,), best, token, scores if noise is None else noise[0], picks, T, C, V,
           NOISY=noise is not None, CHUNKS=next_power_of_2(C), device=scores.device, num_warps=4)  # fmt: skip
    return picks


@triton.jit
def gumbel_kernel(place_ptr, seed_ptr, out_ptr, V, first, CHUNK: tl.constexpr, PDL: tl.constexpr):
    t = tl.program_id(1)
    token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    depend(PDL)
    key = noise_key(tl.load(seed_ptr), tl.load(place_ptr + t))
    tl.store(out_ptr + t * V + token, noise_of(key, token + first), mask=token < V)


@gumbel.impl("triton", on="cuda")
def _gumbel(positions: torch.Tensor, seed: torch.Tensor, vocab: int, first: int = 0) -> torch.Tensor:
    T = positions.shape[0]
    out = torch.empty((T, vocab), dtype=torch.float32, device=positions.device)
    launch(gumbel_kernel, (-(-vocab // CHUNK), T), positions, seed, out, vocab, first, CHUNK=CHUNK,
           device=positions.device, num_warps=4)  # fmt: skip
    return out
