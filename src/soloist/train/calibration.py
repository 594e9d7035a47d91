"""How sure the confidence head should be: temperatures fitted on texts that were not trained on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from soloist.errors import UserError
from soloist.train.sample import Sequences


def calibrate(texts: Sequences, drafts: Tensor, sure: Tensor, bins: int = 15) -> dict[str, Any]:
    """Sequential temperature scaling: one temperature per slot, left to right, smallest calibration error of the
    survival."""
    logits, alive = _outcomes(texts, drafts, sure)
    grid = torch.logspace(-1, 1, 41, dtype=torch.float64)
    survival = torch.ones(len(logits), dtype=torch.float64)
    raw = survival.clone()
    temperatures, before, after = [], [], []
    for k in range(logits.shape[1]):
        raw = raw * logits[:, k].sigmoid()
        errors = [_calibration_error(survival * (logits[:, k] / t).sigmoid(), alive[:, k], bins) for t in grid]
        best = min(range(len(errors)), key=errors.__getitem__)
        survival = survival * (logits[:, k] / grid[best]).sigmoid()
        temperatures.append(round(float(grid[best]), 4))
        before.append(round(_calibration_error(raw, alive[:, k], bins), 4))
        after.append(round(errors[best], 4))
    return {
        "temperatures": temperatures,
        "dataset": "held-out prompts, greedy",
        "num_samples": len(logits),
        "ece_before": before,
        "ece_after": after,
    }


def _outcomes(texts: Sequences, drafts: Tensor, sure: Tensor) -> tuple[Tensor, Tensor]:
    """Confidence logits [M, G] and whether the first k drafts were all right [M, G], at anchors with a whole block
    left."""
    block = drafts.shape[-1]
    logits, alive = [], []
    for row in range(len(texts)):
        low, high = int(texts.prompt[row]), int(texts.end[row]) - block
        if high <= low:
            continue
        truth = torch.stack([texts.ids[row, low + 1 + k : high + 1 + k] for k in range(block)], -1)
        alive.append((drafts[row, low:high] == truth).cumprod(-1))
        logits.append(sure[row, low:high])
    if not logits:
        raise UserError("no text is longer than one block; calibrate on longer texts")
    return torch.cat(logits).double().cpu(), torch.cat(alive).double().cpu()


def _calibration_error(predicted: Tensor, happened: Tensor, bins: int) -> float:
    index = (predicted * bins).long().clamp(max=bins - 1)
    count = torch.zeros(bins, dtype=torch.float64).index_add_(0, index, torch.ones_like(predicted))
    gap = torch.zeros(bins, dtype=torch.float64).index_add_(0, index, predicted - happened)
    return float(gap.abs().sum() / count.sum())
