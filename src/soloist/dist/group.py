"""Who computes together, and their exchanges. A group of one costs nothing: no layer asks it for anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from soloist.dist.channel import Channel
from soloist.errors import RankLost

Result = TypeVar("Result")

SMALL_BYTES = 1 << 20
"""Up to here an all-reduce is a gather and a sum in rank order: it gives a row the same bits in every window, which a
ring, whose order of summation depends on the place in the message, does not. Decoding never sends more.
"""


class Sum(Protocol):
    """An all-reduce for messages of up to `most_values` values."""

    most_values: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Group(Protocol):
    """rank of size. exchange: how sums travel, for people to read. lost: which rank is gone, once one is."""

    rank: int
    size: int
    exchange: str

    @property
    def lost(self) -> str | None: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's x, the same bits on all of them. x may be overwritten."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's x, all of one shape: [size, *x.shape]."""
        ...

    def broadcast_object(self, value: Any = None) -> Any:
        """What rank 0 gives, JSON, to all. On other ranks it waits; None says that rank 0 has closed.   Raises: RankLost."""
        ...

    def abandon(self, error: BaseException) -> None:
        """Leave because of an error. Rank 0 ends the others, others tell rank 0."""
        ...

    def close(self) -> None:
        """Part from the others in peace: they end."""
        ...


class Solo:
    """A process alone."""

    rank: int = 0
    size: int = 1
    exchange: str = "none"
    lost: str | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]

    def broadcast_object(self, value: Any = None) -> Any:
        return value

    def abandon(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        pass


SOLO = Solo()


class Lone(Solo):
    """A rank of several that are not there, to measure what one rank computes, or to plan it. Its text means nothing: it
    takes its own part of every sum for the whole, and its own columns for everybody's.
    """

    def __init__(self, size: int, rank: int = 0):
        self.size, self.rank = size, rank
        self.exchange = "left out"

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(self.size, *x.shape)


class Ranks:
    """Processes joined by torch.distributed: gloo on CPUs, NCCL on GPUs, there with a one-shot sum where peers can write
    each other's memory.

    one_shot: sums small messages, where it was found to be faster; see `Sum`. on_close: what else ends with the group.
    """

    def __init__(
        self, rank: int, size: int, channel: Channel, exchange: str, on_close: Callable[[], None] | None = None
    ):
        self.rank, self.size, self.exchange = rank, size, exchange
        self.one_shot: Sum | None = None
        self._channel, self._on_close = channel, on_close

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.one_shot is not None and x.numel() <= self.one_shot.most_values:
            return self.one_shot(x)
        if x.numel() * x.element_size() <= SMALL_BYTES:
            first, *others = self.all_gather(x).float()
            for other in others:
                first = first + other
            return first.to(x.dtype)
        x = x.contiguous()
        self._talk(lambda: dist.all_reduce(x))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        self._talk(lambda: dist.all_gather(list(gathered), x.contiguous()))
        return gathered

    def broadcast_object(self, value: Any = None) -> Any:
        if self.rank:
            return self._channel.hear()
        self._channel.tell(value)
        return value

    @property
    def lost(self) -> str | None:
        return self._channel.lost

    def abandon(self, error: BaseException) -> None:
        self._channel.complain(error)
        self.close()

    def close(self) -> None:
        self._channel.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._on_close is not None:
            self._on_close()

    def _talk(self, exchange: Callable[[], Result]) -> Result:
        """gloo fails when a peer is gone; the channel knows which one."""
        try:
            return exchange()
        except RuntimeError as error:
            raise RankLost(self._channel.verdict(str(error))) from error
