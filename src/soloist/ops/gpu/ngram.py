"""Prompt lookup in two kernels: every program finds the best match among its tiles of the text, then one copies."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.gpu.launch import depend, launch, next_power_of_2
from soloist.ops.ngram_draft import ngram_draft

PROGRAMS, TILE = 64, 1024


@triton.jit
def match_kernel(
    history_ptr, start_ptr, n_ptr, best_ptr, LONGEST: tl.constexpr, PROGRAMS: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """best [PROGRAMS] int64: the longest match's length, then its last place in the lower 32 bits."""
    depend(PDL)
    end = tl.load(start_ptr) + tl.load(n_ptr)
    best = tl.zeros((TILE,), tl.int64)
    for tile in range(tl.program_id(0), tl.cdiv(end, TILE), PROGRAMS):
        i = tile * TILE + tl.arange(0, TILE).to(tl.int64)
        going = i < end
        length = tl.zeros((TILE,), tl.int64)
        for m in tl.static_range(LONGEST):
            going = going & (i >= m)
            wanted = tl.load(history_ptr + tl.maximum(end - m, 0))
            going = going & (tl.load(history_ptr + i - m, mask=going, other=-1) == wanted)
            length += going.to(tl.int64)
        best = tl.maximum(best, tl.where(length > 0, (length << 32) + i, 0))
    tl.store(best_ptr + tl.program_id(0), tl.max(best, 0))


@triton.jit
def copy_kernel(
    history_ptr, start_ptr, n_ptr, table_ptr, best_ptr, tokens_ptr, chances_ptr, length_ptr, K,
    LONGEST: tl.constexpr, PROGRAMS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, WIDTH)
    depend(PDL)
    end = tl.load(start_ptr) + tl.load(n_ptr)
    best = tl.max(tl.load(best_ptr + tl.arange(0, PROGRAMS)), 0)
    length = best >> 32
    source = tl.where(length > 0, best & 0xFFFFFFFF, end - 1)
    place = source + 1 + k % (end - source)
    tl.store(tokens_ptr + k, tl.load(history_ptr + place, mask=k < K), mask=k < K)
    chance = tl.load(table_ptr + tl.minimum(length + k, LONGEST))
    tl.store(chances_ptr + k, tl.where(length > 1, chance, 0.0), mask=k < K)
    tl.store(length_ptr, length)


@ngram_draft.impl("triton", on="cuda")
def _ngram_draft(
    history: torch.Tensor,
    start: torch.Tensor,
    n: torch.Tensor,
    table: torch.Tensor,
    tokens: torch.Tensor,
    chances: torch.Tensor,
) -> torch.Tensor:
    best = torch.empty(PROGRAMS, dtype=torch.int64, device=history.device)
    length = torch.empty(1, dtype=torch.int64, device=history.device)
    longest, width = table.shape[0] - 1, tokens.shape[0]
    launch(match_kernel, (PROGRAMS,), history, start, n, best, LONGEST=longest, PROGRAMS=PROGRAMS, TILE=TILE,
           device=history.device, num_warps=4)  # fmt: skip
    launch(copy_kernel, (1,), history, start, n, table, best, tokens, chances, length, width, LONGEST=longest,
           PROGRAMS=PROGRAMS, WIDTH=next_power_of_2(max(width, 2)), device=history.device, num_warps=1)  # fmt: skip
    return length
