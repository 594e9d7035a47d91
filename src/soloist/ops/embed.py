"""Rows of the embedding."""

from __future__ import annotations

import torch

from soloist.ops.cases import case, randn
from soloist.ops.op import Case, op


def _case(T: int, V: int, D: int) -> Case:
    return case(lambda g: {"ids": torch.randint(V, (T,), generator=g), "weight": randn(g, V, D)}, f"T{T}-V{V}-D{D}")


@op(cases=[_case(1, 11, 64), _case(16, 30, 1537)], rows="ids")
def embed(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """ids [T] int64, weight [V, D] -> [T, D]."""
    return weight.index_select(0, ids)
