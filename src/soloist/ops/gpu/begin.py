"""The beginning of a round: places, angles and embeddings of the rows, one small kernel each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.embed import embed
from soloist.ops.gpu.launch import depend, launch, next_power_of_2
from soloist.ops.rotation import rotation
from soloist.ops.window_places import window_places

BLOCK = 1024


@triton.jit
def places_kernel(
    length_ptr, positions_ptr, page_ptr, offset_ptr, T, PAGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    depend(PDL)
    position = tl.load(length_ptr) + t
    tl.store(positions_ptr + t, position, mask=t < T)
    tl.store(page_ptr + t, position // PAGE, mask=t < T)
    tl.store(offset_ptr + t, position % PAGE, mask=t < T)


@window_places.impl("triton", on="cuda")
def _window_places(length: torch.Tensor, T: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    places = torch.empty((3, T), dtype=torch.int64, device=length.device)
    positions, page, offset = places.unbind()
    block = min(BLOCK, next_power_of_2(max(T, 2)))
    launch(places_kernel, (-(-T // block),), length, positions, page, offset, T, PAGE=page_size, BLOCK=block,
           device=length.device, num_warps=1)  # fmt: skip
    return positions, page, offset


@triton.jit
def rotation_kernel(
    positions_ptr, inverse_ptr, cos_ptr, sin_ptr, HALF, row_stride, scale, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    depend(PDL)
    inverse = tl.load(inverse_ptr + t * row_stride + i, mask=i < HALF, other=0.0)
    angle = tl.load(positions_ptr + t).to(tl.float32) * inverse
    tl.store(cos_ptr + t * HALF + i, tl.cos(angle) * scale, mask=i < HALF)
    tl.store(sin_ptr + t * HALF + i, tl.sin(angle) * scale, mask=i < HALF)


@rotation.impl("triton", on="cuda")
def _rotation(positions: torch.Tensor, inverse: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    T, half = positions.shape[0], inverse.shape[-1]
    cos, sin = torch.empty((2, T, half), dtype=torch.float32, device=positions.device).unbind()
    stride = half if inverse.dim() == 2 else 0
    launch(rotation_kernel, (T,), positions, inverse, cos, sin, half, stride, scale, BLOCK=next_power_of_2(half),
           device=positions.device, num_warps=1)  # fmt: skip
    return cos, sin


@triton.jit
def embed_kernel(ids_ptr, weight_ptr, out_ptr, V, D, first, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """weight [V, D]: the rows of the tokens from `first` on."""
    t = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    depend(PDL)
    place = tl.load(ids_ptr + t) - first
    row = tl.load(weight_ptr + place * D + d, mask=(d < D) & (place >= 0) & (place < V), other=0.0)
    tl.store(out_ptr + t.to(tl.int64) * D + d, row, mask=d < D)


@embed.impl("triton", on="cuda")
def _embed(ids: torch.Tensor, weight: torch.Tensor, first: int | None = None) -> torch.Tensor:
    T, (V, D) = ids.shape[0], weight.shape
    out = torch.empty((T, D), dtype=weight.dtype, device=weight.device)
    launch(embed_kernel, (T, -(-D // BLOCK)), ids.contiguous(), weight, out, V, D, first or 0, BLOCK=BLOCK, device=weight.device,
           num_warps=4)  # fmt: skip
    return out
