"""How sure a distribution is of its best token."""

from __future__ import annotations

import torch

from soloist.ops.cases import case, randn
from soloist.ops.op import Case, op


def _case(T: int, V: int) -> Case:
    return case(lambda g: {"logits": randn(g, T, V, scale=5)}, f"T{T}-V{V}")


@op(cases=[_case(1, 101), _case(3, 2049), _case(15, 5000)], rows="logits")
def top_chance(logits: torch.Tensor) -> torch.Tensor:
    """The probability of every row's best token.   Args: logits [T, V] fp32.   Returns: [T] fp32."""
    return 1 / (logits - logits.amax(-1, keepdim=True)).exp().sum(-1)
