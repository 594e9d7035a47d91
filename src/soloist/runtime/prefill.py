"""Prefill: the prompt in chunks, then the first token. And teacher-forced logits of a whole text."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from soloist.models.decoder import Output
from soloist.runtime.round import Parts, RoundOutput
from soloist.runtime.sampler import Sampler


def prefill(parts: Parts, sampler: Sampler, prompt: torch.Tensor, chunk: int) -> Iterator[RoundOutput | None]:
    """Consume the prompt [S] and emit the first token, which becomes the anchor.

    Yields None after every chunk but the last, which yields the first token, so that the caller can stop in between.
    Writes: as `decode_round`.
    """
    bufs, S = parts.bufs, prompt.shape[0]
    for out in _chunks(parts, prompt, chunk):
        end = out.window.num_positions
        rows = prompt.new_full((1,), out.ids.shape[0])
        if end < S:
            parts.drafter.observe(out, prompt[end - out.ids.shape[0] + 1 : end + 1], rows)
            yield None
            continue
        row = out.window.positions[-1:]
        logits = parts.model.logits(out.hidden[-1:])
        scores, noise = sampler.scores(logits, prompt[-1:], row)
        report = bufs.finish(scores, noise, prompt[-1:], row, (row.clone(), torch.zeros_like(row), 1))
        parts.drafter.observe(out, torch.cat((out.ids[1:], report[2:])), rows)
        yield RoundOutput(report, sampler.logprobs(logits, report[2:]), parts.drafter.confidence)


def teacher_forced(parts: Parts, ids: torch.Tensor, chunk: int) -> torch.Tensor:
    """Logits after every token of ids [S]: [S, V] fp32. Leaves the sequence holding these ids."""
    return torch.cat([parts.model.logits(out.hidden) for out in _chunks(parts, ids, chunk)])


def _chunks(parts: Parts, prompt: torch.Tensor, chunk: int) -> Iterator[Output]:
    """Forward passes over the prompt; each chunk is committed after the consumer has looked at it."""
    sequence = parts.sequence
    for start in range(0, prompt.shape[0], chunk):
        ids = prompt[start : start + chunk]
        window = sequence.prefill_window(ids.shape[0], start)
        yield parts.model(ids, window, sequence.caches, parts.drafter.taps)
        sequence.commit_prefill(ids.shape[0])
