"""How a request turns logits into tokens: the processors it asked for, in a fixed order, on every row of a window."""

from __future__ import annotations

from typing import NamedTuple

import torch

from soloist.config import SamplingParams
from soloist.dist.vocabulary import Logits
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
        p = params
        for name in ("top_k", "top_p", "min_p", "min_tokens"):
            getattr(bufs, name).fill_(getattr(p, name))
        bufs.temperature.fill_(max(p.temperature, torch.finfo(torch.float32).tiny))  # divides: must not round to 0
        self._penalties = bufs.presence, bufs.frequency, bufs.repetition
        for penalty, value in zip(
            self._penalties, (p.presence_penalty, p.frequency_penalty, p.repetition_penalty), strict=True
        ):
            penalty.fill_(value)
        if p.logit_bias:
            device = bufs.bias.device
            ids, values = torch.tensor(list(p.logit_bias)), torch.tensor(list(p.logit_bias.values()), dtype=torch.float32)
            bufs.bias.zero_().index_copy_(0, ids.to(device), values.to(device))

    @property
    def mode(self) -> tuple[object, ...]:
        """What decides which ops a round runs: requests of equal mode can share a captured round."""
        p = self.params
        return (self.rejection, p.greedy, self._truncates, p.penalised, bool(p.logit_bias), p.min_tokens > 0,
                p.constrained, p.logprobs)  # fmt: skip

    @property
    def _truncates(self) -> bool:
        return self.params.top_k > 0 or self.params.top_p < 1 or self.params.min_p > 0

    @property
    def _picks_plainly(self) -> bool:
        """Whether logits are picked from as they are, so that a rank need not see other ranks' columns."""
        p = self.params
        changed = p.penalised or p.logit_bias or p.min_tokens or p.constrained
        return not (changed or self._truncates or self.rejection and not p.greedy)

    @property
    def _noise(self) -> Noise | None:
        return None if self.params.greedy else (self.bufs.temperature, self.bufs.seed)

    def scores(
        self, logits: Logits, window: torch.Tensor, positions: torch.Tensor, law: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Noise | None]:
        """What one token a row is picked from, as `finish_round` takes it: scores and noise, or the picks themselves.

        Args: logits of T rows; window [T], the tokens of the rows; positions [T], the rows' places. Row j picks for
            place positions[j] + 1, given the tokens window[1 .. j] before it. law: see `Drafter`.
        """
        if logits.is_shared and self._picks_plainly:
            return logits.pick(positions + 1, self._noise), None
        scores, noise = self._temper(self._process(logits.whole, window))
        if self.rejection and noise is not None:
            return pick_or_reject(softened(scores, noise), window, law, positions + 1, self.bufs.seed), None
        return scores, noise

    def logprobs(self, logits: Logits, picks: torch.Tensor) -> Logprobs | None:
        """Of the model's own distributions, where the request asks for them."""
        if self.params.logprobs is None:
            return None
        own = torch.log_softmax(logits.whole, -1)
        best = own.sort(dim=-1, descending=True, stable=True)
        count = self.params.logprobs
        return Logprobs(own.gather(1, picks[:, None])[:, 0], best.indices[:, :count], best.values[:, :count])

    def draft(self, logits: Logits, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See drafters.drafter.Draw. Penalties and min_tokens are left out: they change few picks."""
        if logits.is_shared and self._picks_plainly:
            return logits.pick(places, self._noise), None
        whole = logits.whole + self.bufs.bias if self.params.logit_bias else logits.whole
        scores, noise = self._temper(whole)
        drawn = pick(scores, places, noise)
        tokens = self.forced(drawn, places)
        if not self.rejection or noise is None:
            return tokens, None
        certain = torch.zeros_like(whole).scatter_(1, tokens[:, None], 1.0)
        law = torch.softmax(softened(scores, noise), -1)
        return tokens, torch.where((tokens == drawn)[:, None], law, certain)

    def forced(self, drafts: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The drafts [T], but the grammar's own token at places [T] where it leaves only one."""
        if not self.params.constrained:
            return drafts
        known = self.bufs.forced[places]
        return torch.where(known >= 0, known, drafts)

    def sure(self, chances: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The chances [>= T] of drafts to be accepted, at places [T]: certain where the grammar forces them."""
        if not self.params.constrained:
            return chances
        return torch.where(self.bufs.forced[places] >= 0, 1.0, chances[: len(places)])

    def _process(self, logits: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
        """What the request changes about the model's distributions, row by row given the drafts before the row."""
        p, bufs = self.params, self.bufs
        if p.logit_bias:
            logits = logits + bufs.bias
        if p.penalised:
            logits = penalise(logits, window, bufs.counts, bufs.in_prompt, *self._penalties)
        if p.min_tokens:
            index = bufs.emitted + torch.arange(logits.shape[0], device=logits.device)
            early = (index < bufs.min_tokens)[:, None] & bufs.is_stop
            logits = logits.masked_fill(early, float("-inf"))
        if p.constrained:
            logits = allow(logits, bufs.allowed[: logits.shape[0]])
        return logits

    def _temper(self, logits: torch.Tensor) -> tuple[torch.Tensor, Noise | None]:
        """Scores and noise of `pick`: truncation needs the temperature first, and then the noise has none of its own."""
        bufs, noise = self.bufs, self._noise
        if noise is None or not self._truncates:
            return logits, noise
        scores = truncate(softened(logits, noise), bufs.top_k, bufs.top_p, bufs.min_p)
        return scores, (bufs.one, bufs.seed)


def softened(scores: torch.Tensor, noise: Noise) -> torch.Tensor:
    """The logits [T, V] that `pick` adds its noise to: the largest is 0."""
    return (scores - scores.amax(-1, keepdim=True)) / noise[0]
