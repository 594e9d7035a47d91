"""How a request turns logits into tokens: the processors it asked for, in a fixed order, on every row of a window."""

from __future__ import annotations

from typing import NamedTuple

import torch

from soloist.config import SamplingParams
from soloist.ops.allow import allow
from soloist.ops.penalise import penalise
from soloist.ops.pick import Noise, pick
from soloist.ops.rejection import pick_or_reject
from soloist.ops.truncate import truncate
from soloist.state.buffers import Buffers


class Logprobs(NamedTuple):
    """The picked tokens' [T], and the best alternatives' ids and values [T, L]; fp32."""

    own: torch.Tensor
    top_tokens: torch.Tensor
    top: torch.Tensor


class Sampler:
    """The processors of one request. Which of them run is fixed per request; their values lie on the device.

    rejection: pick by rejection sampling against the drafts (ops/rejection.py), not by noise keyed to the position.
    """

    def __init__(self, params: SamplingParams, bufs: Buffers, rejection: bool = False):
        self.params, self.bufs, self.rejection = params, bufs, rejection
        device = bufs.anchor.device

        def scalar(value: float) -> torch.Tensor:
            return torch.tensor([value], dtype=torch.float32, device=device)

        p = params
        self.temperature, self._one = scalar(p.temperature), scalar(1.0)
        self.top_k = torch.tensor([p.top_k], device=device)
        self.top_p, self.min_p = scalar(p.top_p), scalar(p.min_p)
        self.penalties = scalar(p.presence_penalty), scalar(p.frequency_penalty), scalar(p.repetition_penalty)
        self.bias: torch.Tensor | None = None
        if p.logit_bias:
            self.bias = torch.zeros_like(bufs.counts, dtype=torch.float32)
            self.bias[torch.tensor(list(p.logit_bias), device=device)] = torch.tensor(
                list(p.logit_bias.values()), device=device
            )

    def scores(
        self, logits: torch.Tensor, window: torch.Tensor, positions: torch.Tensor, law: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Noise | None]:
        """What one token a row is picked from, as `finish_round` takes it: scores and noise, or the picks themselves.

        Args: logits [T, V] fp32; window [T], the tokens of the rows; positions [T], the rows' places. Row j picks for
            place positions[j] + 1, given the tokens window[1 .. j] before it. law: see `Drafter`.
        """
        scores, noise = self._temper(self._process(logits, window))
        if self.rejection and noise is not None:
            return pick_or_reject(softened(scores, noise), window, law, positions + 1, self.bufs.seed), None
        return scores, noise

    def logprobs(self, logits: torch.Tensor, picks: torch.Tensor) -> Logprobs | None:
        """Of the model's own distributions, logits [T, V], where the request asks for them."""
        if self.params.logprobs is None:
            return None
        own = torch.log_softmax(logits, -1)
        best = own.sort(dim=-1, descending=True, stable=True)
        count = self.params.logprobs
        return Logprobs(own.gather(1, picks[:, None])[:, 0], best.indices[:, :count], best.values[:, :count])

    def draft(self, logits: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See drafters.drafter.Draw. Penalties and min_tokens are left out: they change few picks."""
        if self.bias is not None:
            logits = logits + self.bias
        scores, noise = self._temper(logits)
        drawn = pick(scores, places, noise)
        tokens = self.forced(drawn, places)
        if not self.rejection or noise is None:
            return tokens, None
        certain = torch.zeros_like(logits).scatter_(1, tokens[:, None], 1.0)
        law = torch.softmax(softened(scores, noise), -1)
        return tokens, torch.where((tokens == drawn)[:, None], law, certain)

    def forced(self, drafts: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The drafts [T], but the grammar's own token at places [T] where it leaves only one."""
        if not self.params.constrained:
            return drafts
        known = self.bufs.forced[places]
        return torch.where(known >= 0, known, drafts)

    def _process(self, logits: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
        """What the request changes about the model's distributions, row by row given the drafts before the row."""
        p, bufs = self.params, self.bufs
        if self.bias is not None:
            logits = logits + self.bias
        if p.penalised:
            logits = penalise(logits, window, bufs.counts, bufs.in_prompt, *self.penalties)
        if p.min_tokens:
            index = bufs.emitted + torch.arange(logits.shape[0], device=logits.device)
            early = (index < p.min_tokens)[:, None] & bufs.is_stop
            logits = logits.masked_fill(early, float("-inf"))
        if p.constrained:
            logits = allow(logits, bufs.allowed[: logits.shape[0]])
        return logits

    def _temper(self, logits: torch.Tensor) -> tuple[torch.Tensor, Noise | None]:
        """Scores and noise of `pick`: truncation needs the temperature first, and then the noise has none of its own."""
        p = self.params
        if p.greedy:
            return logits, None
        if p.top_k < 1 and p.top_p >= 1 and p.min_p <= 0:
            return logits, (self.temperature, self.bufs.seed)
        scores = softened(logits, (self.temperature, self.bufs.seed))
        return truncate(scores, self.top_k, self.top_p, self.min_p), (self._one, self.bufs.seed)


def softened(scores: torch.Tensor, noise: Noise) -> torch.Tensor:
    """The logits [T, V] that `pick` adds its noise to: the largest is 0."""
    return (scores - scores.amax(-1, keepdim=True)) / noise[0]
