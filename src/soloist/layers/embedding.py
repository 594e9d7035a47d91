"""The embedding table, whole or a rank's rows of it."""

from __future__ import annotations

import torch

from soloist.dist.share import Share
from soloist.layers.linear import Vector
from soloist.ops.embed import embed


class Embedding(Vector):
    """weight [V, D]. Of shared rows each rank looks up what it holds, and the sum has every token's."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] int64 -> [T, D]."""
        rows = self.shape[0]
        if not isinstance(rows, Share):
            return embed(ids, self.weight)
        return rows.group.all_reduce(embed(ids, self.weight, rows.start))
