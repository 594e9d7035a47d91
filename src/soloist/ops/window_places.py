"""Where the rows of a window lie."""

from __future__ import annotations

import torch

from soloist.ops.cases import case
from soloist.ops.op import Case, op


def _case(length: int, T: int) -> Case:
    return case(lambda g: {"length": torch.tensor([length]), "T": T, "page_size": 128}, f"S{length}-T{T}")


@op(cases=[_case(0, 1), _case(127, 5), _case(8191, 16), _case(3, 1500)])
def window_places(length: torch.Tensor, T: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The T places after the first length [1] int64.

    Returns: (positions, the page of each, its offset in the page), [T] int64. All are copies: they stay when the
    length moves on.
    """
    positions = length + torch.arange(T, device=length.device)
    return positions, positions // page_size, positions % page_size
