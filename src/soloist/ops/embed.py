"""Rows of the embedding, or of the part of it that lies here."""

from __future__ import annotations

import torch

from soloist.ops.cases import case, randn
from soloist.ops.op import Case, op


def _case(T: int, V: int, D: int, first: int | None = None) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        return {"ids": torch.randint(V, (T,), generator=g), "weight": randn(g, V // 2 if first else V, D), "first": first}

    return case(draw, f"T{T}-V{V}-D{D}-{first}")


@op(cases=[_case(1, 11, 64), _case(16, 30, 1537), _case(16, 30, 100, 9)], rows="ids")
def embed(ids: torch.Tensor, weight: torch.Tensor, first: int | None = None) -> torch.Tensor:
    """The rows of tokens.

    Args: ids [T] int64; weight [V, D], or with `first` the V' rows of the tokens from there on, where others have zeros.
    Returns: [T, D].
    """
    if first is None:
        return weight.index_select(0, ids)
    places, held = ids - first, weight.shape[0]
    here = (places >= 0) & (places < held)
    return weight.index_select(0, places.clamp(0, held - 1)).where(here[:, None], 0.0)
