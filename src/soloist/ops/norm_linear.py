"""Products whose input is normed on the way: the residual stream's RMS norm, and KDA's gated norm of every head."""

from __future__ import annotations

import torch

from soloist.ops.cases import case, randn
from soloist.ops.elementwise import sigmoid
from soloist.ops.linear import Weight, linear
from soloist.ops.op import Case, op
from soloist.ops.rms_norm import add_rms_norm, rms_norm
from soloist.ops.swiglu import swiglu

Norm = tuple[torch.Tensor, float]
"""Weight [D] and epsilon."""


def _case(T: int, D: int, N: int, branch: bool, bias: bool, limit: float | None = None) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        drawn = {"residual": randn(g, T, D), "branch": randn(g, T, D) if branch else None, "norm": (randn(g, D), 1e-6),
                 "weight": randn(g, N, D, scale=D**-0.5)}  # fmt: skip
        return {**drawn, "bias": randn(g, N) if bias else None} if limit is None else {**drawn, "limit": limit}

    return case(draw, f"T{T}-D{D}-N{N}{'-branch' * branch}{'-bias' * bias}")


def normed(residual: torch.Tensor, branch: torch.Tensor | None, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm of the residual stream after the branch, that stream)."""
    if branch is None:
        return rms_norm(residual, *norm), residual
    return add_rms_norm(branch, residual, *norm)


@op(cases=[_case(1, 64, 101, False, False), _case(4, 96, 24, True, True), _case(11, 130, 70, True, False)],
    rows="residual branch", rtol=1e-4, atol=1e-4)  # fmt: skip
def add_norm_linear(
    residual: torch.Tensor,
    branch: torch.Tensor | None,
    norm: Norm,
    weight: Weight,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a branch to the residual stream and multiply the norm of the sum by a weight.

    Args: residual [T, D]; branch [T, D], or None at the first layer; weight [N, D] or that weight packed; bias [N].
    Returns: (y [T, N], the new residual stream [T, D]).
    """
    x, residual = normed(residual, branch, norm)
    return linear(x, weight, bias), residual


@op(cases=[_case(1, 64, 48, True, False, 0.0), _case(5, 100, 66, True, False, 0.4), _case(16, 96, 200, False, False, 0.0)],
    rows="residual branch", rtol=1e-4, atol=1e-4)  # fmt: skip
def add_norm_gate_up(
    residual: torch.Tensor, branch: torch.Tensor | None, norm: Norm, weight: Weight, limit: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first half of a gated MLP behind the norm: `add_norm_linear`, then `swiglu`.

    Args: weight [2F, D], the gate in the first half, or that weight packed.   Returns: ([T, F], the new residual stream).
    """
    x, residual = normed(residual, branch, norm)
    return swiglu(linear(x, weight), limit), residual


def _gated_case(T: int, H: int, D: int, N: int) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        return {"o": randn(g, T, H, D), "gate": randn(g, T, H, D), "norm": (randn(g, D), 1e-6),
                "weight": randn(g, N, H * D, scale=(H * D) ** -0.5)}  # fmt: skip

    return case(draw, f"T{T}-H{H}-D{D}-N{N}")


@op(cases=[_gated_case(1, 4, 32, 48), _gated_case(5, 3, 33, 17), _gated_case(16, 9, 64, 40)], rows="o gate",
    rtol=1e-4, atol=1e-4)  # fmt: skip
def gated_norm_linear(o: torch.Tensor, gate: torch.Tensor, norm: Norm, weight: Weight) -> torch.Tensor:
    """RMS norm of each head times sigmoid(gate), all in fp32, then the output projection.

    Args: o [T, H, D] fp32; gate [T, H, D], whose dtype is the product's; norm weight [D]; weight [N, H * D] or packed.
    Returns: [T, N].   Source: Kimi Linear paper.
    """
    scale = o.square().mean(-1, keepdim=True).add_(norm[1]).rsqrt_()
    x = o * scale * norm[0].float() * sigmoid(gate.float())
    return linear(x.to(gate.dtype).reshape(o.shape[0], -1), weight)
