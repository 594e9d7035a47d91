"""Who computes together, and their exchanges. A group of one costs nothing: no layer asks it for anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from soloist.dist.channel import Channel
from soloist.errors import RankLost
from soloist.ops.exchange import exchange

Result = TypeVar("Result")

SMALL_BYTES = 1 << 20
"""Up to here an all-reduce is a gather and a sum in rank order: it gives a row the same bits in every window, which a
ring, whose order of summation depends on the place in the message, does not. Decoding never sends more.
"""


class OneShot(Protocol):
    """Exchanges of up to `most_values` values in one kernel. missed [1]: not 0 if a rank did not answer."""

    most_values: int
    missed: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def gather(self, x: torch.Tensor) -> torch.Tensor: ...

    def give_up(self) -> None: ...


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

    def meet(self) -> None:
        """Wait until all ranks are here, also if one takes minutes."""
        ...

    def check(self) -> None:
        """Raises: RankLost if a rank is gone, without waiting for anybody."""
        ...

    def ready(self, busy: Callable[[], bool]) -> None:
        """The model is built. busy: whether a request runs, so that somebody waits for the others."""
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

    def meet(self) -> None:
        pass

    def check(self) -> None:
        pass

    def ready(self, busy: Callable[[], bool]) -> None:
        pass

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
    """Processes joined by torch.distributed: gloo on CPUs, NCCL on GPUs, there with one-shot exchanges where peers can
    write each other's memory.

    one_shot: carries small messages, where it was found to be faster. on_close: what else ends with the group.
    """

    def __init__(
        self, rank: int, size: int, channel: Channel, exchange: str, on_close: Callable[[], None] | None = None
    ):
        self.rank, self.size, self.exchange = rank, size, exchange
        self.one_shot: OneShot | None = None
        self._channel, self._on_close = channel, on_close

    def take(self, one_shot: OneShot) -> None:
        """Use it from now on."""
        self.one_shot = one_shot
        self._channel.at_end.append(one_shot.give_up)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = exchange(x, self._sum)
        return summed

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = exchange(x, self._gather)
        return gathered

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        if self.one_shot is not None and x.numel() <= self.one_shot.most_values:
            return self.one_shot(x)
        if x.numel() * x.element_size() <= SMALL_BYTES:
            first, *others = self._gather(x).float()
            for other in others:
                first = first + other
            return first.to(x.dtype)
        x = x.contiguous()
        self._talk(lambda: dist.all_reduce(x))
        return x

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        if self.one_shot is not None and x.dtype == torch.float32 and x.numel() <= self.one_shot.most_values:
            return self.one_shot.gather(x)
        gathered = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        self._talk(lambda: dist.all_gather(list(gathered), x.contiguous()))
        return gathered

    def meet(self) -> None:
        self._talk(dist.barrier)

    def check(self) -> None:
        if self.lost is not None or (self.one_shot is not None and self.one_shot.missed.item()):
            raise RankLost(self._channel.verdict("a rank did not answer for most of a minute"))

    def ready(self, busy: Callable[[], bool]) -> None:
        self._channel.busy = busy

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
