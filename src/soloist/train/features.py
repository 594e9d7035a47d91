"""What the drafter reads of its frozen target, computed once for all texts: tapped layers and the final state.

The target never changes, and a text is trained on many times. Features stay on the device where they fit, in the host's
memory where they do not; where neither has room, the target runs anew for every batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from soloist.runtime.memory import free_bytes
from soloist.train.loop import autocast
from soloist.train.sample import Sequences
from soloist.train.target import Target

# of the memory that is free, what the features may take
SHARE = 0.5
# texts that the target reads at once
READ_AT_ONCE = 16


class Features:
    """Features of texts [N, T], by row. Stored in the dtype of the target's head, which is what reads them."""

    def __init__(self, target: Target, texts: Sequences, taps: tuple[int, ...]) -> None:
        self.target, self.texts, self.taps = target, texts, taps
        self.device, dtype = texts.ids.device, target.head.dtype
        self.width = target.head.shape[1]
        size = (*texts.ids.shape, (1 + len(taps)) * self.width)
        place = _room(texts.ids.numel() * size[-1] * dtype.itemsize, self.device)
        self.kept = None if place is None else torch.empty(size, dtype=dtype, device=place)
        if self.kept is not None:
            for start in range(0, len(texts), READ_AT_ONCE):
                self.kept[start : start + READ_AT_ONCE] = self._read(texts.ids[start : start + READ_AT_ONCE]).to(dtype)

    def rows(self, pick: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The normed hidden state [B, T, D] and the tapped outputs [B, T, D] of the chosen texts, pick [B]."""
        if self.kept is None:
            found = self._read(self.texts.ids[pick])
        else:
            found = self.kept[pick.to(self.kept.device)].to(self.device)
        hidden, *tapped = found.split(self.width, -1)
        return hidden, tapped

    @torch.no_grad()
    def _read(self, ids: Tensor) -> Tensor:
        with autocast(self.device):
            hidden, tapped, _ = self.target.hidden(ids, self.taps)
        return torch.cat([hidden, *tapped], -1)


def _room(num_bytes: int, device: torch.device) -> torch.device | None:
    """Where so much fits."""
    places = [device, torch.device("cpu")] if device.type == "cuda" else [device]
    return next((place for place in places if num_bytes < SHARE * free_bytes(place)), None)
