"""Cosine and sine of every row's rotary angles."""

from __future__ import annotations

import torch

from soloist.ops.cases import case
from soloist.ops.op import Case, op


def _case(T: int, half: int, own: bool) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        inverse = 1e4 ** -(torch.arange(half) / half)
        return {"positions": torch.arange(8000, 8000 + T), "inverse": inverse.expand(T, half).clone() if own else inverse,
                "scale": 1.25 if own else 1.0}  # fmt: skip

    return case(draw, f"T{T}-D{2 * half}{'-own' if own else ''}")


@op(cases=[_case(1, 32, False), _case(5, 33, True), _case(16, 64, False)], rtol=1e-4, atol=1e-5)
def rotation(positions: torch.Tensor, inverse: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Args: positions [T] int64; inverse [D/2], or [T, D/2] where rows have frequencies of their own, fp32.
    Returns: (cos, sin) times scale, [T, D/2] fp32.
    """
    angles = positions[:, None].float() * inverse
    return angles.cos() * scale, angles.sin() * scale
