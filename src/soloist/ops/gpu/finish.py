"""The end of a round: the first stage of picking over the vocabulary, then one program that does all the rest."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.accept import FULL, RUNNING, STOPPED
from soloist.ops.finish_round import finish_round
from soloist.ops.gpu.launch import depend, launch, next_power_of_2
from soloist.ops.gpu.pick import best_of_chunks, best_tokens
from soloist.ops.pick import Noise

_RUNNING, _STOPPED, _FULL = tl.constexpr(RUNNING), tl.constexpr(STOPPED), tl.constexpr(FULL)


@triton.jit
def finish_kernel(
    best_ptr, token_ptr, temperature_ptr, window_ptr, positions_ptr, is_stop_ptr, history_ptr, counts_ptr, anchor_ptr,
    emitted_ptr, budget_ptr, done_ptr, length_ptr, live_ptr, rows_ptr, report_ptr, T, C, V, slots,
    PICKED: tl.constexpr, NOISY: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program. PICKED: token [T] holds the picks."""
    t = tl.arange(0, ROWS)
    inside = t < T
    depend(PDL)
    if PICKED:
        picks = tl.load(token_ptr + t, mask=inside, other=0)
    else:
        picks = best_tokens(best_ptr, token_ptr, temperature_ptr, t, T, C, V, NOISY, ROWS, CHUNKS)
        picks = tl.where(inside, picks, 0)
    following = tl.load(window_ptr + t + 1, mask=t + 1 < T, other=-1)
    position = tl.load(positions_ptr + t, mask=inside, other=0)
    stops = (tl.load(is_stop_ptr + picks, mask=inside, other=0) != 0) & inside
    anchor = tl.load(anchor_ptr)
    emitted = tl.load(emitted_ptr)
    budget = tl.load(budget_ptr)
    done = tl.load(done_ptr)
    length = tl.load(length_ptr)
    live = tl.load(live_ptr)
    rows = tl.full((), T, tl.int64) if rows_ptr is None else tl.load(rows_ptr)
    # Every warp has read the state before one of them changes it.
    tl.debug_barrier()
    agreed = tl.min(tl.where((picks == following) & inside, ROWS, t), 0) + 1
    before_stop = tl.min(tl.where(stops, t, ROWS), 0)
    n = tl.minimum(tl.minimum(tl.minimum(agreed, before_stop + 1).to(tl.int64), rows), budget)
    n = tl.where(done == _RUNNING, tl.maximum(n, 0), 0)
    now = tl.where(before_stop < n, _STOPPED, tl.where(n >= budget, _FULL, _RUNNING)).to(tl.int64)
    now = tl.where(done == _RUNNING, now, done)
    tl.store(history_ptr + position + 1, picks, mask=inside)
    tl.atomic_add(counts_ptr + picks, tl.full((ROWS,), 1, tl.int64), mask=t < n, sem="relaxed")
    tl.store(anchor_ptr, tl.where(n > 0, tl.sum(tl.where(t == n - 1, picks, 0), 0), anchor))
    tl.store(emitted_ptr, emitted + n)
    tl.store(budget_ptr, budget - n)
    tl.store(done_ptr, now)
    tl.store(length_ptr, length + n)
    tl.store(live_ptr, (live + n) % slots)
    tl.store(report_ptr, n)
    tl.store(report_ptr + 1, now)
    tl.store(report_ptr + 2, rows)
    tl.store(report_ptr + 3 + t, picks, mask=inside)


@finish_round.impl("triton", on="cuda")
def _finish_round(
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
    T, picked = scores.shape[0], scores.dim() == 1
    best, token = (scores, scores) if picked else best_of_chunks(scores, positions, noise, 1)
    report = torch.empty(3 + T, dtype=torch.int64, device=scores.device)
    V, C = is_stop.shape[0], 1 if picked else token.shape[1]
    launch(finish_kernel, (1,), best, token, scores if noise is None else noise[0], window, positions,
           is_stop.view(torch.uint8), history, counts, anchor, emitted, budget, done, length, live, rows, report, T, C, V, slots,
           PICKED=picked, NOISY=noise is not None, ROWS=next_power_of_2(max(T, 2)), CHUNKS=next_power_of_2(C),
           device=scores.device, num_warps=4)  # fmt: skip
    return report
