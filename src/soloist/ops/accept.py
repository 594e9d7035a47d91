"""Acceptance: how many tokens of a window are emitted."""

from __future__ import annotations

import torch

from soloist.ops.cases import case
from soloist.ops.op import Case, op

RUNNING, STOPPED, FULL = 0, 1, 2
"""Values of the `done` flag: still decoding; a stop token was emitted; the budget or the context is used up."""


def _case(T: int, agree: int, budget: int, stop: int | None, rows: int | None = None) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        picks = torch.arange(100, 100 + T)
        window = torch.cat((torch.tensor([7]), picks[:-1]))
        window[agree + 1 :] = 3
        is_stop = torch.zeros(200, dtype=torch.bool)
        if stop is not None:
            is_stop[100 + stop] = True
        return {"picks": picks, "window": window, "is_stop": is_stop, "budget": torch.tensor([budget]),
                "done": torch.tensor([RUNNING]), "rows": None if rows is None else torch.tensor([rows])}  # fmt: skip

    return case(draw, f"T{T}-agree{agree}-budget{budget}-stop{stop}-rows{rows}")


@op(cases=[_case(1, 0, 9, None), _case(5, 4, 9, None), _case(5, 2, 9, 1), _case(8, 7, 3, 5), _case(4, 0, 9, 0),
           _case(8, 7, 9, 5, 3)])  # fmt: skip
def accept(
    picks: torch.Tensor,
    window: torch.Tensor,
    is_stop: torch.Tensor,
    budget: torch.Tensor,
    done: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Emit the picks up to the first that the next window token does not equal, a stop token, or the budget.

    Row j's pick is the target's token for the place of window[j + 1]. A stop token is emitted and ends the request.
    Nothing is emitted once `done` is set: that is the surplus round after a stop.

    Args: picks, window [T]; is_stop [V] bool; budget [1], tokens still allowed; done [1]; rows [1] where only the first
        of them count.
    Returns: (n [1] int64, emitted tokens = rows that stay; done [1]).
    """
    T = picks.shape[0]
    agreed = (picks[:-1] == window[1:]).long().cumprod(0).sum(0, keepdim=True) + 1
    agreed = agreed if rows is None else torch.minimum(agreed, rows)
    stops = is_stop[picks].long()
    before_stop = (1 - stops).cumprod(0).sum(0, keepdim=True)  # rows ahead of the first stop token
    n = torch.minimum(torch.minimum(agreed, before_stop + 1), budget).clamp(0, T)
    n = torch.where(done == RUNNING, n, torch.zeros_like(n))
    stopped = (before_stop < n).long() * STOPPED
    full = (n >= budget).long() * FULL
    now = torch.where(stopped > 0, stopped, full)
    return n, torch.where(done == RUNNING, now, done)
