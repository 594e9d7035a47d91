"""A head's product whose columns ranks share: most rounds need no more of it than one token a row."""

from __future__ import annotations

from functools import cached_property

import torch

from soloist.dist.share import Share, gather_columns
from soloist.ops.pick import Noise, pick
from soloist.ops.pick_part import pick_best, pick_part
from soloist.ops.top_chance import top_chance


class Logits:
    """Rows of logits. columns [T, V] fp32, or a rank's columns of them; size: V, or that rank's share of it."""

    def __init__(self, columns: torch.Tensor, size: int):
        self.columns, self.size = columns, size

    @property
    def is_shared(self) -> bool:
        return isinstance(self.size, Share)

    @cached_property
    def whole(self) -> torch.Tensor:
        """[T, V] on every rank: megabytes on their way, where `pick` exchanges three numbers a row."""
        return gather_columns(self.columns, self.size)

    def pick(self, places: torch.Tensor, noise: Noise | None) -> torch.Tensor:
        """See ops/pick: [T] int64, the same on all ranks."""
        if not isinstance(self.size, Share):
            return pick(self.columns, places, noise)
        part = pick_part(self.columns, places, noise, self.size.start)
        return pick_best(self.size.group.all_gather(part), None if noise is None else noise[0])

    def top_chance(self) -> torch.Tensor:
        """See ops/top_chance: [T]."""
        if not isinstance(self.size, Share):
            return top_chance(self.columns)
        peak = self.columns.amax(-1)
        mass = (self.columns - peak[:, None]).exp().sum(-1)
        peaks, masses = self.size.group.all_gather(torch.stack((peak, mass))).unbind(1)
        return 1 / (masses * (peaks - peaks.amax(0)).exp()).sum(0)
