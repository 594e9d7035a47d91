"""A mixture-of-experts feed-forward behind its norm: router, routed experts, shared expert."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from soloist.ops.cases import case, randn
from soloist.ops.linear import Weight, linear
from soloist.ops.moe_experts import moe_experts
from soloist.ops.norm_linear import Norm, normed
from soloist.ops.op import Case, op
from soloist.ops.route import route
from soloist.ops.swiglu import swiglu


class Routing(NamedTuple):
    """How tokens choose experts: see `route`. `bias` [E] fp32 takes part in the choice alone."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    top_k: int
    num_groups: int
    top_groups: int
    score: Literal["sigmoid", "softmax"]
    normalise: bool
    scaling: float


class RoutedExperts(NamedTuple):
    """gate_up [E', 2F, D] and down [E', D, F]; limit as in `swiglu`.

    Where the experts are shared out over ranks, these are the E' from number `first` on, and others weigh nothing.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    limit: float
    first: int = 0


class SharedExpert(NamedTuple):
    """gate_up [2F, D] and down [D, F] of the expert that every token visits."""

    gate_up: Weight
    down: Weight
    limit: float


def _case(T: int, E: int, top_k: int, groups: int, D: int, F: int, shared: int, score: str = "sigmoid") -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        bias = randn(g, E, scale=0.1) if score == "sigmoid" else None
        routing = Routing(randn(g, E, D, scale=D**-0.5), bias, top_k, groups, max(1, groups // 2), score, True, 2.5)  # type: ignore[arg-type]
        experts = RoutedExperts(randn(g, E, 2 * F, D, scale=D**-0.5), randn(g, E, D, F, scale=F**-0.5), 0.7)
        both = SharedExpert(randn(g, 2 * shared, D, scale=D**-0.5), randn(g, D, shared, scale=D**-0.5), 0.0) if shared else None
        return {"residual": randn(g, T, D), "branch": randn(g, T, D), "norm": (randn(g, D), 1e-6), "routing": routing,
                "experts": experts, "shared": both}  # fmt: skip

    return case(draw, f"T{T}-E{E}-top{top_k}-groups{groups}-D{D}-F{F}-shared{shared}-{score}")


@op(cases=[_case(1, 16, 4, 4, 64, 24, 24), _case(5, 24, 3, 3, 70, 17, 33), _case(11, 8, 2, 1, 48, 16, 0, "softmax"),
           _case(3, 12, 2, 1, 40, 40, 16)], rows="residual branch", rtol=1e-4, atol=1e-4)  # fmt: skip
def moe(
    residual: torch.Tensor,
    branch: torch.Tensor,
    norm: Norm,
    routing: Routing,
    experts: RoutedExperts,
    shared: SharedExpert | None,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the branch to the residual stream and run the experts on the norm of the sum.

    The router multiplies in fp32 where its weight is fp32, and in the stream's dtype otherwise.

    Args: residual, branch [T, D]; rows [1] int64 where only the first of them count: the others' branch means nothing, and
        what they alone choose need not be read.   Returns: (branch [T, D], the new residual stream [T, D]).
    Source: DeepSeek-V3, Ling-3.0, Qwen3-MoE.
    """
    x, residual = normed(residual, branch, norm)
    logits = linear(x.to(routing.weight.dtype), routing.weight).float()
    weights, chosen = route(logits, *routing[1:])
    held = experts.down.shape[0]
    if held < logits.shape[1]:
        places = chosen - experts.first
        weights = weights.where((places >= 0) & (places < held), 0.0)
        chosen = places.clamp(0, held - 1)
    out = moe_experts(x, weights, chosen, experts.gate_up, experts.down, experts.limit)
    if shared is not None:
        out = out + linear(swiglu(linear(x, shared.gate_up), shared.limit), shared.down)
    return out, residual
