"""What a drafter is: three verbs. And the drafter of plain decoding, which proposes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from soloist.dist.vocabulary import Logits
from soloist.models.decoder import Decoder, Output
from soloist.state.buffers import Buffers
from soloist.state.sequence import Sequence, Window

Draw = Callable[[Logits, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""How the request picks tokens: (draft logits of T rows, the places [T] that the tokens will take) -> (tokens [T],
their law [T, V] where acceptance needs it). The noise is that of the final pick, so a good draft is picked again.
"""


class Drafter(Protocol):
    """Proposes tokens for the model to verify. Device only, own state only, never verifies.

    width: most tokens it proposes a round. taps: layers whose output stream `observe` wants to see, ascending.
    confidence [width] fp32: the latest estimate of each proposed token's chance to be accepted, given that those before
    it are; None from a drafter that cannot tell. It decides how many tokens are verified, never which.
    foresees: after `observe` the confidence is that of the coming proposal, otherwise still that of the last one.
    law [K, V] fp32: the distributions from which the K tokens of the last `propose` were drawn, with noise of their
    own; None where the tokens follow from the past and the request's seed. Only acceptance by rejection reads it.
    """

    name: str
    width: int
    taps: tuple[int, ...]
    confidence: torch.Tensor | None
    foresees: bool
    law: torch.Tensor | None

    def bind(self, model: Decoder, sequence: Sequence, bufs: Buffers) -> None:
        """Meet the model and the state it will work beside; once, before the first request."""
        ...

    def reset(self) -> None:
        """Forget the last request."""
        ...

    def observe(self, out: Output, following: torch.Tensor, n: torch.Tensor) -> None:
        """See a forward pass: following[j] is the token after window token j; the first n [1] rows stay.

        The buffers hold the emitted tokens already, the sequence has not yet committed them. out.ids may be the anchor,
        which has moved on. Every pass is observed, also of rounds in which nothing was proposed.
        """
        ...

    def propose(self, bufs: Buffers, window: Window, draw: Draw) -> torch.Tensor:
        """The next tokens after the anchor: [window.width] int64, all ids of the vocabulary.

        window: the room that the anchor and the proposals will take, 1 <= window.width <= self.width. Until the model
        runs over it, its places in the drafter's own caches are free to use.
        """
        ...


class NoDraft:
    """Plain decoding: the round with nothing drafted."""

    name = "none"
    width = 0
    taps: tuple[int, ...] = ()
    confidence: torch.Tensor | None = None
    foresees = False
    law: torch.Tensor | None = None

    def bind(self, model: Decoder, sequence: Sequence, bufs: Buffers) -> None:
        pass

    def reset(self) -> None:
        pass

    def observe(self, out: Output, following: torch.Tensor, n: torch.Tensor) -> None:
        pass

    def propose(self, bufs: Buffers, window: Window, draw: Draw) -> torch.Tensor:
        raise AssertionError("plain decoding asks for no proposal")
