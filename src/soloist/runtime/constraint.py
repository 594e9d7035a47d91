"""A request's grammar beside its rounds: the host follows the drafts while the device runs the model over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from soloist.config import MAX_WINDOW
from soloist.state.buffers import Buffers
from soloist.text.grammar import Grammar


class Constraint:
    """Keeps the buffers true to the grammar: `allowed` for the next pick, `forced` for the next drafts.

    Args: grammar: at its beginning; place: the first that will be emitted.
    """

    def __init__(self, grammar: Grammar, bufs: Buffers, place: int):
        self._grammar, self._bufs, self._place = grammar, bufs, place
        device = bufs.allowed.device
        self._rows = torch.empty(bufs.allowed.shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._known = torch.empty(MAX_WINDOW, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.num_forced = 0
        self._allow([])

    def follow(self, ids: torch.Tensor) -> Callable[[], None]:
        """Ask for the window ids [T] on the host. The call returned waits for them and writes bufs.allowed[:T]; made
        after the forward pass was launched, it costs the device nothing.
        """
        if ids.device.type == "cpu":
            return lambda: self._allow(ids[1:].tolist())
        ids_host, arrived = ids.to("cpu", non_blocking=True), torch.cuda.Event()
        arrived.record()

        def allow() -> None:
            arrived.synchronize()
            self._allow(ids_host[1:].tolist())

        return allow

    def take(self, tokens: Sequence[int]) -> None:
        """Go on behind emitted tokens, after which the request still runs.   Writes: bufs.forced."""
        self._grammar.advance(tokens)
        self._place += len(tokens)
        forced = self._grammar.forced()[:MAX_WINDOW]
        self.num_forced = len(forced)
        self._known.fill_(-1)
        self._known[: len(forced)] = torch.tensor(forced, dtype=torch.int64)
        ahead = self._bufs.forced[self._place : self._place + MAX_WINDOW]
        ahead.copy_(self._known[: len(ahead)], non_blocking=True)

    def _allow(self, drafts: Sequence[int]) -> None:
        rows = self._rows[: len(drafts) + 1]
        self._grammar.fill(rows.numpy(), drafts)
        self._bufs.allowed[: len(rows)].copy_(rows, non_blocking=True)
