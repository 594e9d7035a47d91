"""A rank's share of a dimension. Sizes in a configuration are ints; shared out over ranks they stay ints, and remember.

So a layer is written once, for whole sizes: built from a shared configuration it allocates its share, its weights know
which rows or columns of the stored tensor are theirs, and a product over a shared dimension knows that it must be summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from soloist.dist.group import Group


class Share(int):
    """The size of a rank's contiguous part of a dimension, with its start, the whole size and the group that shares it.

    A share times a number is the share of a dimension that is longer by that factor: heads times their width.
    """

    start: int
    total: int
    group: Group

    def __new__(cls, size: int, start: int, total: int, group: Group) -> Share:
        self = super().__new__(cls, size)
        self.start, self.total, self.group = start, total, group
        return self

    def __mul__(self, times: int) -> Share:
        return Share(int(self) * times, self.start * times, self.total * times, self.group)

    __rmul__ = __mul__


def share(total: int, group: Group) -> int:
    """This rank's part of a dimension in even blocks: the first ranks hold one more where it does not divide."""
    if group.size == 1:
        return total
    start, size = _block(total, group.rank, group.size)
    return Share(size, start, total, group)


def _block(total: int, rank: int, size: int) -> tuple[int, int]:
    """(start, size) of a rank's even block."""
    each, more = divmod(total, size)
    return each * rank + min(rank, more), each + (rank < more)


def whole(size: int) -> int:
    """The size of the whole dimension."""
    return size.total if isinstance(size, Share) else size


@dataclass(frozen=True)
class Cut:
    """A part of a stored tensor: `size` entries from `start` on along `dim`, of `total`."""

    dim: int
    start: int
    size: int
    total: int


def cuts(shape: Sequence[int]) -> tuple[Cut, ...]:
    """What a tensor of shared dimensions holds of the stored one."""
    return tuple(Cut(dim, s.start, int(s), s.total) for dim, s in enumerate(shape) if isinstance(s, Share))


# ---- a shared vocabulary -----------------------------------------------------------------------------------------------


def columns(x: torch.Tensor, size: int) -> torch.Tensor:
    """A rank's columns of x [..., V]."""
    return x[..., size.start : size.start + size] if isinstance(size, Share) else x


def gather_columns(x: torch.Tensor, size: int) -> torch.Tensor:
    """Every rank's columns [T, share of V] -> [T, V], the same on all ranks."""
    if not isinstance(size, Share):
        return x
    blocks = [_block(size.total, rank, size.group.size)[1] for rank in range(size.group.size)]
    padded = torch.nn.functional.pad(x, (0, max(blocks) - x.shape[-1]))
    parts = size.group.all_gather(padded)
    return torch.cat([part[..., :n] for part, n in zip(parts, blocks, strict=True)], -1)
