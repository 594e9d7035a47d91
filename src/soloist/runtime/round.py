"""The round: draft, forward over the window, pick, accept, commit, append.

One function for every mode: plain decoding drafts nothing. It reads and writes device tensors only, so the same
function runs eagerly on the CPU and can be captured as one CUDA graph for every width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from soloist.drafters.drafter import Drafter
from soloist.models.decoder import Decoder
from soloist.ops.accept import accept
from soloist.runtime.sampler import Picks, Sampler
from soloist.state.buffers import Buffers
from soloist.state.sequence import Sequence


@dataclass(frozen=True)
class Parts:
    """What a round works with."""

    model: Decoder
    sequence: Sequence
    bufs: Buffers
    drafter: Drafter


@dataclass(frozen=True)
class RoundOutput:
    """What a round leaves for the host, on the device: of the picks [T] the first n [1] were emitted; done [1];
    confidence, the drafter's after the round, which the next one overwrites.
    """

    picks: Picks
    n: torch.Tensor
    done: torch.Tensor
    confidence: torch.Tensor | None = None


def decode_round(parts: Parts, sampler: Sampler, bound: int, width: int) -> RoundOutput:
    """Emit one token or more.

    Args: bound: a host number not below the position after the window, see `Sequence.window`. width: how many tokens to
        draft, 0 for a plain round. The shapes of a round depend on these two alone.
    Writes: the sequence's caches, length and live slot; the buffers; the drafter's state.
    """
    model, sequence, bufs, drafter = parts.model, parts.sequence, parts.bufs, parts.drafter
    window = sequence.window(width + 1, bound)
    ids = torch.cat((bufs.anchor, drafter.propose(bufs, window, sampler.draft))) if width else bufs.anchor.clone()
    out = model(ids, window, sequence.caches, drafter.taps)
    picks = sampler(model.logits(out.hidden), ids, window.positions, drafter.law)
    n, done = accept(picks.tokens, ids, bufs.is_stop, bufs.budget, bufs.done)
    bufs.append(picks.tokens, n, done, window.positions)
    drafter.observe(out, picks.tokens, n)
    sequence.commit(n)
    return RoundOutput(picks, n, done, drafter.confidence)
