"""Prompt lookup: propose what followed the last place where the text ended like this."""

from __future__ import annotations

import torch

from soloist.drafters.drafter import Draw
from soloist.models.decoder import Decoder, Output
from soloist.ops.ngram_draft import ngram_draft
from soloist.state.buffers import Buffers
from soloist.state.sequence import Sequence, Window

CONFIDENCE = (0.0, 0.0, 0.35, 0.5, 0.65, 0.75, 0.82, 0.86, 0.9)
"""Chance that the copy goes on, by the number of tokens that matched so far; the last entry is for that many or more.
Every accepted token makes the match one longer.
"""


class NgramDrafter:
    """Needs no weights and no state beside the text. The whole history is compared anew after every round: against a
    forward pass that costs nothing, and there is no index that could be wrong.
    """

    name = "ngram"
    taps: tuple[int, ...] = ()
    confidence: torch.Tensor | None = None
    foresees = True
    law: torch.Tensor | None = None

    def __init__(self, width: int):
        self.width = width

    def bind(self, model: Decoder, sequence: Sequence, bufs: Buffers) -> None:
        device = bufs.anchor.device
        self._bufs = bufs
        self._table = torch.tensor(CONFIDENCE, device=device)
        self._tokens = torch.zeros(self.width, dtype=torch.int64, device=device)
        self._chances = self.confidence = torch.zeros(self.width, device=device)

    def reset(self) -> None:
        pass

    def observe(self, out: Output, following: torch.Tensor, n: torch.Tensor) -> None:
        """Looks up the coming proposal at once, so that its confidence is known before the next round."""
        history = self._bufs.history[: out.window.num_positions + 1]
        ngram_draft(history, out.window.positions[:1], n, self._table, self._tokens, self._chances)

    def propose(self, bufs: Buffers, window: Window, draw: Draw) -> torch.Tensor:
        return self._tokens[: window.width]
