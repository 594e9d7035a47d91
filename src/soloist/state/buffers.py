"""The request's tensors: what rounds read and write besides caches. All on the device; the host fills them between
requests and never reads them in a round.
"""

from __future__ import annotations

import torch

from soloist.config import MAX_WINDOW
from soloist.ops.accept import RUNNING
from soloist.ops.allow import num_words
from soloist.ops.finish_round import finish_round
from soloist.ops.pick import Noise


class Buffers:
    """anchor [1]: the last emitted token, which the model has not consumed yet. emitted [1]: tokens emitted so far.
    budget [1]: tokens still allowed. done [1]: see ops/accept. is_stop [V] bool: tokens that end the request.
    history [capacity]: token of every position, valid up to and including the anchor's. counts [V]: how often each
    token was emitted. in_prompt [V] bool. seed [1]. Where a grammar holds: allowed [MAX_WINDOW, words] int32, what may
    come after every row of the window, see ops/allow; forced [capacity]: the token that must take a place, or -1, for
    the places that the next window may reach.

    What a request asks of its sampler, [1] each: temperature, top_p, min_p, presence, frequency, repetition fp32; top_k,
    min_tokens int64; bias [V] fp32; one, a temperature that changes nothing. All tensors stay where they are, so a
    captured round serves every request that runs the same processors.

    What the choice of the width goes by, fp32, see `choose_width`: costs [MAX_WINDOW], factors [MAX_WINDOW - 1], saved [1].
    As they are made here they make every draft worth verifying. The host writes all of them at once, see `tell`.
    """

    def __init__(self, vocab_size: int, capacity: int, device: torch.device):
        def whole(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        def real(size: int) -> torch.Tensor:
            return torch.ones(size, dtype=torch.float32, device=device)

        self.anchor, self.emitted, self.budget, self.done, self.seed = (whole(1) for _ in range(5))
        self.temperature, self.top_p, self.min_p, self.one = (real(1) for _ in range(4))
        self.presence, self.frequency, self.repetition = (real(1) for _ in range(3))
        self.top_k, self.min_tokens, self.bias = whole(1), whole(1), real(vocab_size)
        self.history, self.counts = whole(capacity), whole(vocab_size)
        self.is_stop = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.forced = whole(capacity)
        self._told = real(2 * MAX_WINDOW)
        self.costs, self.factors, self.saved = self._told.split((MAX_WINDOW, MAX_WINDOW - 1, 1))
        self.saved.zero_()
        self.allowed = torch.zeros(MAX_WINDOW, num_words(vocab_size), dtype=torch.int32, device=device)

    def start(self, prompt: torch.Tensor, budget: int, stop_ids: tuple[int, ...], seed: int) -> None:
        """Prepare for a request with prompt ids [S] on the device."""
        self.emitted.zero_()
        self.counts.zero_()
        self.budget.fill_(budget)
        self.done.fill_(RUNNING)
        self.seed.fill_(seed)
        self.history[: prompt.shape[0]] = prompt
        self.is_stop.zero_()
        self.in_prompt.zero_()
        self.in_prompt[prompt] = True
        if stop_ids:
            self.is_stop[torch.tensor(stop_ids, device=self.is_stop.device)] = True

    def tell(self, costs: list[float], factors: list[float], saved: float) -> None:
        """What the next rounds' choice of width goes by; of costs and factors as many as there are widths."""
        rest = MAX_WINDOW - len(costs)
        told = [*costs, *costs[-1:] * rest, *factors, *[1.0] * rest, saved]
        pinned = torch.tensor(told, dtype=torch.float32, pin_memory=self._told.device.type == "cuda")
        self._told.copy_(pinned, non_blocking=True)

    def finish(
        self,
        scores: torch.Tensor,
        noise: Noise | None,
        window: torch.Tensor,
        positions: torch.Tensor,
        counters: tuple[torch.Tensor, torch.Tensor, int],
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Emit what `finish_round` accepts; the last token of it becomes the anchor.

        counters: length, live and slots of the sequence, to be advanced as far.   Returns: see `finish_round`.
        """
        return finish_round(scores, noise, window, positions, self.is_stop, self.history, self.counts, self.anchor,
                            self.emitted, self.budget, self.done, *counters, rows)  # fmt: skip
