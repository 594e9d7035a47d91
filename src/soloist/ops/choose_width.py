"""How many of the proposed tokens are worth verifying: the prefix that promises most tokens a millisecond."""

from __future__ import annotations

import torch

from soloist.ops.cases import case
from soloist.ops.op import Case, op


def _case(chances: list[float], factor: float, slope: float, saved: float) -> Case:
    """slope: what a row adds to a round's cost, in plain rounds."""
    K = len(chances)

    def draw(g: torch.Generator) -> dict[str, object]:
        return {"confidence": torch.tensor([*chances, 0.5, 0.5]), "factors": torch.full((15,), factor),
                "costs": 2.0 * (1 + slope * torch.arange(16)), "saved": torch.tensor([saved]), "width": K}  # fmt: skip

    return case(draw, f"K{K}-first{chances[0]}-factor{factor}-slope{slope}-saved{saved}")


@op(cases=[_case([0.9, 0.8, 0.2, 0.9], 1.0, 0.3, 1.0), _case([0.9] * 13, 1.2, 0.2, 0.7), _case([0.1], 1.0, 0.5, 1.0),
           _case([0.7] * 7, 0.6, 0.4, 0.9), _case([0.6] * 13, 1.0, 0.5, 0.0), _case([0.0, 0.9, 0.9], 1.0, 0.3, 1.0)])  # fmt: skip
def choose_width(
    confidence: torch.Tensor, factors: torch.Tensor, costs: torch.Tensor, saved: torch.Tensor, width: int
) -> torch.Tensor:
    """The rows of a window that are worth their time: the anchor's and those of the first drafts. Of equal ones the most.

    A prefix of w drafts survives with the product of its chances, confidence * factors up to 1. Verifying it in a round
    that drafted `width` costs costs[width] - saved (costs[width] - costs[w]).

    Args: confidence [>= width], factors [>= width], costs [> width] ms above 0, saved [1] from 0 to 1; all fp32.
    Returns: [1] int64, from 1 to width + 1.
    """
    survival = (confidence[:width] * factors[:width]).clamp_max(1.0).cumprod(0)
    tokens = torch.cat((torch.ones_like(saved), 1 + survival.cumsum(0)))
    widest = costs[width]
    value = tokens / (widest - saved * (widest - costs[: width + 1]))
    return width + 1 - value.flip(0).argmax(0, keepdim=True)
