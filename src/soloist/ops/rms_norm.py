"""RMS norm, alone and fused with the residual addition before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from soloist.ops.cases import case, randn
from soloist.ops.op import Case, op


def _case(T: int, D: int) -> Case:
    return case(lambda g: {"x": randn(g, T, D), "weight": randn(g, D), "eps": 1e-6}, f"T{T}-D{D}")


@op(cases=[_case(1, 64), _case(4, 100), _case(16, 1536)], rows="x")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; statistics in fp32, weight applied in x's dtype.

    Args: x [..., D]; weight [D] in x's dtype.   Returns: [..., D] in x's dtype.
    """
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype) * weight


def _add_case(T: int, D: int) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        return {"x": randn(g, T, D), "residual": randn(g, T, D), "weight": randn(g, D), "eps": 1e-6}

    return case(draw, f"T{T}-D{D}")


@op(cases=[_add_case(1, 64), _add_case(5, 100), _add_case(16, 1536)], rows="x residual")
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual stream and norm the sum.

    Args: x, residual [T, D]; weight [D].   Returns: (normed [T, D], new residual [T, D]).
    """
    total = residual + x
    return rms_norm.reference(total, weight, eps), total
