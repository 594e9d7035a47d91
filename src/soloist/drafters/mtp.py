"""NEXTN: the checkpoint's own next-token-prediction layer, chained over its own outputs.

The layer's row at place p joins the hidden state of p with the token after p and predicts the token behind it. Rows of
a chain are written from the layer's own outputs; `observe` writes them again from the model's true hidden states, as in
training, so the cache holds nothing approximate and rejected rows need no undoing.
Source: the MTP wiring of the public Ling-3.0 serving code; DeepSeek-V3 (arXiv 2412.19437).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from soloist.dist.vocabulary import Logits
from soloist.drafters.backlog import Backlog, Seen
from soloist.drafters.calibration import tempered
from soloist.drafters.drafter import Draw
from soloist.errors import UserError
from soloist.models.decoder import Decoder, MtpLayer, Output
from soloist.state.buffers import Buffers
from soloist.state.sequence import Sequence, Window


class MtpDrafter:
    """One forward of the layer a drafted token; the first comes from the row that `observe` ran last.

    With temperatures [width] it tells how sure it is: the probability of its best token at every place, from a logit
    divided by the place's temperature. Without them nobody asks, and it costs nothing.
    """

    name = "mtp"
    taps: tuple[int, ...] = ()
    foresees = False

    def __init__(self, layer: MtpLayer, width: int, temperatures: torch.Tensor | None = None):
        self.layer, self.width, self.temperatures = layer, width, temperatures
        self.confidence = None if temperatures is None else torch.ones_like(temperatures)
        self.law: torch.Tensor | None = None
        self._backlog = Backlog()

    def bind(self, model: Decoder, sequence: Sequence, bufs: Buffers) -> None:
        self._model = model
        self._caches = [sequence.add(spec) for spec in self.layer.cache_specs()]
        self._last = torch.zeros(1, model.config.hidden_size, dtype=model.dtype, device=bufs.anchor.device)

    def reset(self) -> None:
        self._last.zero_()
        self._backlog.clear()
        if self.confidence is not None:
            self.confidence.fill_(1.0)

    def observe(self, out: Output, following: torch.Tensor, n: torch.Tensor) -> None:
        """Rows from n on are wrong and lie where the next chain and the next window write."""
        self._see(self._backlog.add(out, following, n))

    def _see(self, passes: Iterable[Seen]) -> None:
        for out, following, n in passes:
            hidden = self._forward(following, out.hidden, out.window)
            self._last.copy_(hidden.index_select(0, (n - 1).clamp_min(0)))

    def propose(self, bufs: Buffers, window: Window, draw: Draw) -> torch.Tensor:
        self._see(self._backlog.passes())
        hidden, tokens, laws, rows = self._last, list[torch.Tensor](), list[torch.Tensor](), list[Logits]()
        for j in range(window.width):
            if j:  # the row of a drafted token lies one place before it
                hidden = self._forward(tokens[-1], hidden, window.row(j - 1))
            rows.append(self._model.score(hidden))
            token, law = draw(rows[-1], window.positions[j : j + 1] + 1)
            tokens.append(token)
            laws += [] if law is None else [law]
        self.law = torch.cat(laws) if laws else None
        if self.confidence is not None and self.temperatures is not None:
            chances = Logits(torch.cat([row.columns for row in rows]), rows[0].size).top_chance()
            self.confidence[: window.width] = tempered(torch.logit(chances), self.temperatures[: window.width])
        return torch.cat(tokens)

    def _forward(self, following: torch.Tensor, hidden: torch.Tensor, window: Window) -> torch.Tensor:
        model, rope = self._model, self.layer.rope
        rotation = None if rope is None else model.rotaries[rope].tables(window.positions, window.base_length)
        embedding = model.embed(following)
        out: torch.Tensor = self.layer(embedding, hidden, window, self._caches, rotation)
        return out


def build_mtp(decoder: Decoder, width: int, temperatures: list[float] | None = None) -> MtpDrafter:
    """temperatures: for a drafter that tells how sure it is; the last one also serves the places behind it.

    Raises: UserError for a checkpoint with several MTP layers, whose order of use no public file defines.
    """
    if len(decoder.mtp) != 1:
        raise UserError(f"drafter=mtp runs one MTP layer, the checkpoint has {len(decoder.mtp)}; use drafter=ngram")
    layer = decoder.mtp[0]
    assert isinstance(layer, MtpLayer)
    if temperatures is None:
        return MtpDrafter(layer, width)
    places = [temperatures[min(place, len(temperatures) - 1)] for place in range(width)]
    return MtpDrafter(layer, width, torch.tensor(places, device=decoder.embed.weight.device))
