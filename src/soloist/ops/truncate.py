"""top_k, top_p and min_p: logits outside the kept set become minus infinity."""

from __future__ import annotations

import torch

from soloist.ops.cases import case, randn
from soloist.ops.op import Case, op


def _case(T: int, V: int, top_k: int, top_p: float, min_p: float) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        return {"logits": randn(g, T, V, scale=3), "top_k": torch.tensor([top_k]), "top_p": torch.tensor([top_p]),
                "min_p": torch.tensor([min_p])}  # fmt: skip

    return case(draw, f"T{T}-V{V}-k{top_k}-p{top_p}-min{min_p}")


@op(cases=[_case(1, 101, 5, 1.0, 0.0), _case(4, 300, 0, 0.7, 0.0), _case(16, 101, 40, 0.9, 0.05)], rows="logits")
def truncate(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Keep the top_k largest, of these the smallest set whose probabilities reach top_p, of these those with at least
    min_p times the largest probability. Ties go to the lower token; the most probable token always stays.

    Args: logits [T, V] fp32, already divided by the temperature; top_k [1] int64, < 1 keeps all; top_p, min_p [1] fp32.
    Returns: [T, V] fp32.
    """
    V = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(V, device=logits.device)
    limit = torch.where(top_k < 1, V, top_k)
    ordered = ordered.masked_fill(rank >= limit, float("-inf"))
    probs = torch.softmax(ordered, -1)
    before = probs.cumsum(-1) - probs
    dropped = ((before >= top_p) | (probs < min_p * probs[:, :1])) & (rank > 0)
    ordered = ordered.masked_fill(dropped, float("-inf"))
    return torch.empty_like(logits).scatter_(1, order, ordered)
