"""The round: draft, forward over the window, pick, accept, commit, append.

One function for every mode: plain decoding drafts nothing. It reads and writes device tensors only, so the same
function runs eagerly on the CPU and can be captured as one CUDA graph for every width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from soloist.drafters.drafter import Drafter
from soloist.models.decoder import Decoder, Output
from soloist.ops.choose_width import choose_width
from soloist.runtime.sampler import Logprobs, Sampler
from soloist.state.buffers import Buffers
from soloist.state.sequence import Sequence, Window


@dataclass(frozen=True)
class Parts:
    """What a round works with. trims: a round verifies those drafts only that the drafter's confidence makes worth it."""

    model: Decoder
    sequence: Sequence
    bufs: Buffers
    drafter: Drafter
    trims: bool = False


@dataclass(frozen=True)
class RoundOutput:
    """What a round leaves for the host, on the device: the report of `finish_round` [3 + T]; logprobs of the picks, where
    asked for; confidence, the drafter's after the round, which the next one overwrites.
    """

    report: torch.Tensor
    logprobs: Logprobs | None
    confidence: torch.Tensor | None


Follow = Callable[[torch.Tensor], Callable[[], None]]
"""See `Constraint.follow`."""


def decode_round(
    parts: Parts, sampler: Sampler, bound: int, width: int, follow: Follow | None = None
) -> RoundOutput:
    """Emit one token or more.

    Args: bound: a host number not below the position after the window, see `Sequence.window`. width: how many tokens to
        draft, 0 for a plain round. The shapes of a round depend on these two alone. follow: where a grammar holds, the
        only part of a round in which the host reads anything.
    Writes: the sequence's caches, length and live slot; the buffers; the drafter's state.
    """
    window, ids = draft(parts, sampler, bound, width)
    if window.rows is not None and ids.device.type == "cpu":
        T = int(window.rows)  # here nothing waits for a number
        window, ids = window.first(T), ids[:T]
    allow = None if follow is None else follow(ids)
    out = parts.model(ids, window, parts.sequence.caches, parts.drafter.taps)
    if allow is not None:
        allow()
    return settle(parts, sampler, out)


def draft(parts: Parts, sampler: Sampler, bound: int, width: int) -> tuple[Window, torch.Tensor]:
    """Room for the window, and its tokens: the anchor and what is drafted behind it. window.rows: those worth verifying."""
    bufs = parts.bufs
    window = parts.sequence.window(width + 1, bound)
    if not width:
        return window, bufs.anchor  # which moves on only when the round has read it
    drafts, confidence = parts.drafter.propose(bufs, window, sampler.draft), parts.drafter.confidence
    if parts.trims and confidence is not None:
        chances = sampler.sure(confidence, window.positions[1:])
        window = replace(window, rows=choose_width(chances, bufs.factors, bufs.costs, bufs.saved, width))
    return window, torch.cat((bufs.anchor, sampler.forced(drafts, window.positions[1:])))


def settle(parts: Parts, sampler: Sampler, out: Output) -> RoundOutput:
    """Pick, accept, commit, append, once the model has run over the window."""
    drafter, positions = parts.drafter, out.window.positions
    logits = parts.model.score(out.hidden)
    scores, noise = sampler.scores(logits, out.ids, positions, drafter.law)
    report = parts.bufs.finish(scores, noise, out.ids, positions, parts.sequence.counters, out.window.rows)
    picks = report[3:]
    drafter.observe(out, picks, report[:1])
    return RoundOutput(report, sampler.logprobs(logits, picks), drafter.confidence)
