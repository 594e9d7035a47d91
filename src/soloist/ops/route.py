"""The router: which experts a token goes to, and with what weight."""

from __future__ import annotations

from typing import Literal

import torch

from soloist.ops.cases import case, randn
from soloist.ops.elementwise import sigmoid
from soloist.ops.op import Case, op


def _case(T: int, E: int, top_k: int, groups: int, top_groups: int, score: str, bias: float | None) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        selection_bias = None if bias is None else randn(g, E, scale=0.3) + bias
        return {"logits": randn(g, T, E, scale=2), "selection_bias": selection_bias, "top_k": top_k,
                "num_groups": groups, "top_groups": top_groups, "score": score, "normalise": True,
                "scaling": 2.5}  # fmt: skip

    return case(draw, f"T{T}-E{E}-top{top_k}-groups{groups}-{score}")


@op(
    cases=[_case(1, 16, 4, 4, 2, "sigmoid", -0.9), _case(5, 24, 3, 3, 2, "sigmoid", 0.2),
           _case(16, 128, 8, 8, 4, "sigmoid", 0.0), _case(4, 10, 3, 1, 1, "softmax", None)],
    rows="logits",
)  # fmt: skip
def route(
    logits: torch.Tensor,
    selection_bias: torch.Tensor | None,
    top_k: int,
    num_groups: int,
    top_groups: int,
    score: Literal["sigmoid", "softmax"],
    normalise: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick the experts of every token. Ties go to the lower index.

    The bias takes part in the choice, not in the weights. With groups, experts compete only inside the `top_groups`
    groups whose two largest biased scores sum highest.

    Args: logits [T, E] fp32; selection_bias [E] fp32 or None.
    Returns: (weights [T, A] fp32, experts [T, A] int64), best first.   Source: DeepSeek-V3 (noaux_tc); Qwen3-MoE.
    """
    scores = sigmoid(logits) if score == "sigmoid" else torch.softmax(logits, -1)
    choice = scores if selection_bias is None else scores + selection_bias
    if num_groups > 1:
        grouped = choice.view(choice.shape[0], num_groups, -1)
        group_score = grouped.topk(2, -1).values.sum(-1)
        best = _top(group_score, top_groups)
        outside = torch.ones_like(group_score, dtype=torch.bool).scatter_(1, best, False)
        choice = grouped.masked_fill(outside[..., None], float("-inf")).flatten(1)
    experts = _top(choice, top_k)
    weights = scores.gather(1, experts)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling, experts


def _top(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the largest scores, best first, ties to the lower index (topk leaves ties open)."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
