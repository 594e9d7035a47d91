"""RMS norm of a row in one kernel, alone and behind the residual addition."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.gpu.launch import depend, launch, next_power_of_2
from soloist.ops.rms_norm import add_rms_norm, rms_norm


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, stream_ptr, D, eps, ADD: tl.constexpr, DP: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * D
    d = tl.arange(0, DP)
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    depend(PDL)
    x = tl.load(x_ptr + row + d, mask=d < D, other=0.0).to(tl.float32)
    if ADD:
        x = (x + tl.load(residual_ptr + row + d, mask=d < D, other=0.0).to(tl.float32)).to(y_ptr.dtype.element_ty)
        tl.store(stream_ptr + row + d, x, mask=d < D)
        x = x.to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, 0) / D + eps)).to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row + d, (normed * weight).to(y_ptr.dtype.element_ty), mask=d < D)


def run(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, the stream), both shaped as x [..., D]."""
    x, D = x.contiguous(), x.shape[-1]
    y, stream = torch.empty_like(x), torch.empty_like(x) if residual is not None else x
    launch(
        rms_norm_kernel, (x.numel() // D,), x, residual, weight, y, stream, D, eps, ADD=residual is not None,
        DP=next_power_of_2(D), num_warps=4 if D <= 4096 else 8, device=x.device,
    )  # fmt: skip
    return y, stream


@rms_norm.impl("triton", on="cuda")
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return run(x, None, weight, eps)[0]


@add_rms_norm.impl("triton", on="cuda")
def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return run(x, residual.contiguous(), weight, eps)
