"""Rotary position embedding."""

from __future__ import annotations

import torch

from soloist.ops.cases import case, randn
from soloist.ops.op import Case, op


def _case(T: int, H: int, D: int, interleaved: bool) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        angles = randn(g, T, D // 2, scale=50)
        x = randn(g, T, H, D)
        return {"x": x, "cos": angles.cos(), "sin": angles.sin(), "interleaved": interleaved}

    return case(draw, f"T{T}-H{H}-D{D}-{'pairs' if interleaved else 'halves'}")


@op(cases=[_case(1, 3, 64, False), _case(5, 4, 16, True), _case(16, 2, 66, True)], rows="x cos sin")
def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate channel pairs by the angle of their row; computed in fp32, rounded once.

    Pairs are (2i, 2i+1) if interleaved (Ling), otherwise (i, i + D/2) (Llama, Qwen). The layout is kept.

    Args: x [T, H, D]; cos, sin [T, D/2] fp32.   Returns: [T, H, D] in x's dtype.
    """
    wide = x.float()
    cos, sin = cos[:, None], sin[:, None]
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
        out = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    else:
        first, second = wide.chunk(2, -1)
        out = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return out.to(x.dtype)
