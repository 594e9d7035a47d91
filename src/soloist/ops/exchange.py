"""An exchange between ranks as an op, so that a profile tells communication from computing."""

from __future__ import annotations

from collections.abc import Callable

import torch

from soloist.ops.op import op


@op(cases=[])
def exchange(x: torch.Tensor, carry: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """carry(x), which other ranks call at the same time with theirs. It has no cases: it needs the others."""
    return carry(x)
