"""Prefill: the prompt in passes, then the first token. And teacher-forced logits of a whole text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from soloist.models.decoder import Output
from soloist.runtime.round import Parts, RoundOutput
from soloist.runtime.sampler import Sampler
from soloist.state.prefix import PrefixCache

CUT = 64
"""On a CPU a prompt may be cut at multiples of this, the rows that KDA and attention take together: see `cut_size`."""


def prefill(
    parts: Parts, sampler: Sampler, prompt: torch.Tensor, chunk: int, prefixes: PrefixCache
) -> Iterator[RoundOutput | None]:
    """Consume the prompt [S], behind what the sequence holds of it, and emit the first token, which becomes the anchor.

    Yields None after every pass but the last, which yields the first token, so that the caller can stop in between.
    Writes: as `decode_round`; what was computed is kept for later prompts.
    """
    bufs, S = parts.bufs, prompt.shape[0]
    for out in _passes(parts, prompt, ends(prefixes.begun, S, chunk, prefixes.stops), prefixes.begun):
        end, T = out.window.num_positions, out.ids.shape[0]
        rows = prompt.new_full((1,), T)
        report = None
        if end < S:
            parts.drafter.observe(out, prompt[end - T + 1 : end + 1], rows)
        else:
            row = out.window.positions[-1:]
            logits = parts.model.score(out.hidden[-1:])
            scores, noise = sampler.scores(logits, prompt[-1:], row)
            report = bufs.finish(scores, noise, prompt[-1:], row, (row.clone(), torch.zeros_like(row), 1))
            parts.drafter.observe(out, torch.cat((out.ids[1:], report[3:])), rows)
        parts.sequence.commit_prefill(T)
        prefixes.keep(end)
        if report is None:
            yield None
        else:
            yield RoundOutput(report, sampler.logprobs(logits, report[3:]), parts.drafter.confidence)


def teacher_forced(parts: Parts, ids: torch.Tensor, chunk: int) -> torch.Tensor:
    """Logits after every token of ids [S]: [S, V] fp32. Leaves the sequence holding these ids."""
    return torch.cat([parts.model.logits(hidden) for hidden in _hidden(parts, ids, ends(0, ids.shape[0], chunk))])


def ends(begun: int, S: int, chunk: int, stops: Iterable[int] = ()) -> list[int]:
    """Where the passes over the positions begun .. S - 1 end."""
    return sorted({*range(begun + chunk, S, chunk), *stops, S})


def cut_size(parts: Parts, chunk: int) -> int:
    """Positions at whose multiples a prompt may be cut without changing a bit of what comes after: CUT or `chunk`.

    At multiples of `chunk` a prompt is cut anyway. Elsewhere the number of rows that are computed together must not
    matter to a row. The ops see to that on a CPU, as far as its libraries allow, which is found out by trying; on other
    devices the libraries choose their kernels by the number of rows.
    """
    S = CUT + 9  # few rows and many take different ways through the libraries
    if parts.sequence.device.type != "cpu" or chunk % CUT or parts.sequence.context_length < S:
        return chunk
    ids = torch.arange(S) % parts.model.config.vocab_size
    found = []
    for stops in ((), (CUT,)):
        parts.sequence.reset(S)
        found.append(torch.cat(list(_hidden(parts, ids, ends(0, S, chunk, stops)))))
    return CUT if torch.equal(*found) else chunk


def _hidden(parts: Parts, ids: torch.Tensor, pauses: list[int]) -> Iterator[torch.Tensor]:
    """The hidden states of passes over ids [S], each committed."""
    for out in _passes(parts, ids, pauses):
        parts.sequence.commit_prefill(out.ids.shape[0])
        yield out.hidden


def _passes(parts: Parts, prompt: torch.Tensor, pauses: list[int], begun: int = 0) -> Iterator[Output]:
    """Forward passes over the prompt from position `begun` on; the consumer commits each."""
    sequence = parts.sequence
    for start, end in zip([begun, *pauses], pauses, strict=False):
        window = sequence.prefill_window(end - start, start)
        yield parts.model(prompt[start:end], window, sequence.caches, parts.drafter.taps)
