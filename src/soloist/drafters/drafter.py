"""What a drafter is: three verbs. And the drafter of plain decoding, which proposes nothing."""

from __future__ import annotations

from typing import Protocol

import torch

from soloist.models.decoder import Decoder, Output
from soloist.state.buffers import Buffers
from soloist.state.sequence import Sequence


class Drafter(Protocol):
    """Proposes `width` tokens a round. Device only, own state only, never verifies.

    taps: layers whose output stream `observe` wants to see, ascending.
    """

    name: str
    width: int
    taps: tuple[int, ...]

    def bind(self, model: Decoder, sequence: Sequence, bufs: Buffers) -> None:
        """Meet the model and the state it will work beside; once, before the first request."""
        ...

    def reset(self) -> None:
        """Forget the last request."""
        ...

    def observe(self, out: Output, following: torch.Tensor, n: torch.Tensor) -> None:
        """See a forward pass: following[j] is the token after window token j; the first n [1] rows stay."""
        ...

    def propose(self, bufs: Buffers) -> torch.Tensor:
        """The next tokens after the anchor: [width] int64."""
        ...


class NoDraft:
    """Plain decoding: the round with nothing drafted."""

    name = "none"
    width = 0
    taps: tuple[int, ...] = ()

    def bind(self, model: Decoder, sequence: Sequence, bufs: Buffers) -> None:
        self._nothing = torch.empty(0, dtype=torch.int64, device=bufs.anchor.device)

    def reset(self) -> None:
        pass

    def observe(self, out: Output, following: torch.Tensor, n: torch.Tensor) -> None:
        pass

    def propose(self, bufs: Buffers) -> torch.Tensor:
        return self._nothing
