"""The end of a round in one op: pick, accept, append, commit, and the report to the host."""

from __future__ import annotations

import torch

from soloist.ops.accept import accept
from soloist.ops.cases import case, randn
from soloist.ops.op import Case, op
from soloist.ops.pick import Noise, pick

WRITTEN = frozenset(("history", "counts", "anchor", "emitted", "budget", "done", "length", "live"))
"""The arguments that are state."""


def _case(T: int, V: int, agree: int, budget: int, stop: int | None, temperature: float | None, done: int = 0,
          rows: int | None = None) -> Case:  # fmt: skip
    """agree: how many drafts are what will be picked."""

    def draw(g: torch.Generator) -> dict[str, object]:
        positions, scores = torch.arange(30, 30 + T), randn(g, T, V, scale=4)
        scores[-1] = scores[0]  # a token that may be emitted twice
        noise = None if temperature is None else (torch.tensor([temperature]), torch.tensor([11]))
        picks = pick.reference(scores, positions + 1, noise)
        window = torch.cat((torch.tensor([7]), picks[:-1]))
        window[agree + 1 :] += 1
        is_stop = torch.zeros(V, dtype=torch.bool)
        if stop is not None:
            is_stop[picks[stop]] = True

        def scalar(value: int) -> torch.Tensor:
            return torch.tensor([value])

        return {"scores": picks if temperature == 0 else scores, "noise": None if temperature == 0 else noise,
                "window": window, "positions": positions, "is_stop": is_stop, "history": torch.arange(64),
                "counts": torch.arange(V), "anchor": scalar(7), "emitted": scalar(5), "budget": scalar(budget),
                "done": scalar(done), "length": scalar(30), "live": scalar(T), "slots": T + 1,
                "rows": None if rows is None else scalar(rows)}  # fmt: skip

    return case(draw, f"T{T}-V{V}-agree{agree}-budget{budget}-stop{stop}-{temperature}-done{done}-rows{rows}")


@op(
    cases=[_case(1, 101, 0, 9, None, None), _case(5, 3000, 4, 9, None, None), _case(5, 1025, 2, 9, None, 0.8),
           _case(8, 300, 7, 3, 5, 1.0), _case(16, 5000, 15, 99, 12, 1.3), _case(4, 101, 3, 9, 0, None),
           _case(4, 101, 3, 9, None, None, done=1), _case(3, 101, 2, 1, 0, None), _case(6, 101, 4, 9, None, 0),
           _case(16, 2000, 15, 99, None, None), _case(8, 300, 7, 99, 5, 1.0, rows=3), _case(6, 101, 1, 99, None, None, rows=4)],
)  # fmt: skip
def finish_round(
    scores: torch.Tensor,
    noise: Noise | None,
    window: torch.Tensor,
    positions: torch.Tensor,
    is_stop: torch.Tensor,
    history: torch.Tensor,
    counts: torch.Tensor,
    anchor: torch.Tensor,
    emitted: torch.Tensor,
    budget: torch.Tensor,
    done: torch.Tensor,
    length: torch.Tensor,
    live: torch.Tensor,
    slots: int,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Emit the accepted picks and make them part of the sequence. Nothing changes once `done` is set.

    Args: scores [T, V] fp32 and noise: see `pick`; or, with noise None, scores [T] int64: tokens picked already.
        window [T], the tokens of the rows; positions [T], their places: pick j takes the place after row j's. The
        others are state of the request, see Buffers, and of the sequence: length [1], and live [1] among `slots`;
        rows [1] where only the first of the window count.
    Writes: history, places of all picks; counts, by the emitted ones; the [1] tensors.
    Returns: [3 + T] int64: how many tokens were emitted, done, how many rows counted, and the picks.
    Source: `accept` has the rules.
    """
    picks = scores if scores.dim() == 1 else pick(scores, positions + 1, noise)
    n, now = accept(picks, window, is_stop, budget, done, rows)
    place = torch.arange(picks.shape[0], device=picks.device)
    history.index_copy_(0, positions + 1, picks)
    counts.scatter_add_(0, picks, (place < n).long())
    last = picks.gather(0, (n - 1).clamp_min(0))
    anchor.copy_(torch.where(n > 0, last, anchor))
    emitted.add_(n)
    budget.sub_(n)
    done.copy_(now)
    length.add_(n)
    live.add_(n).remainder_(slots)
    counted = torch.full_like(n, picks.shape[0]) if rows is None else rows
    return torch.cat((n, now, counted, picks))
