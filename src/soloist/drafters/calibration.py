"""Sequential temperature scaling: makes a confidence head's chances come true, place by place.

Source: the DSpark paper (arXiv 2607.05147); binned calibration error after Guo et al. (arXiv 1706.04599).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BINS = 15
TEMPERATURES = torch.logspace(-1, 1, 41, dtype=torch.float64)


@dataclass(frozen=True)
class Calibration:
    """temperatures [K], by which a place's confidence logit is divided; expected calibration errors of the survival of
    every prefix, before and after; num_samples rounds they were measured on.
    """

    temperatures: tuple[float, ...]
    errors_before: tuple[float, ...]
    errors_after: tuple[float, ...]
    num_samples: int


def fit_temperatures(logits: torch.Tensor, accepted: torch.Tensor) -> Calibration:
    """Fit one temperature a place, from the first place on, so that the product of the chances up to there is the
    frequency with which all drafts up to there are accepted.

    Args: logits [N, K] of the confidence head; accepted [N] int64, accepted drafts of the same rounds. All K drafts
        must have been verified in every round, otherwise late places look worse than they are.
    """
    N, K = logits.shape
    assert accepted.shape == (N,), (accepted.shape, N)
    logits = logits.double()
    raw = torch.ones(N, dtype=torch.float64)
    survival, temperatures, before, after = raw, [], [], []
    for place in range(K):
        outcome = (accepted > place).double()
        raw = raw * torch.sigmoid(logits[:, place])
        tried = survival * torch.sigmoid(logits[:, place] / TEMPERATURES[:, None])  # [temperatures, N]
        errors = torch.stack([calibration_error(row, outcome) for row in tried])
        best = int(errors.argmin())
        survival = tried[best]
        temperatures.append(float(TEMPERATURES[best]))
        before.append(float(calibration_error(raw, outcome)))
        after.append(float(errors[best]))
    return Calibration(tuple(temperatures), tuple(before), tuple(after), N)


def calibration_error(chances: torch.Tensor, outcomes: torch.Tensor) -> torch.Tensor:
    """Mean distance between chance and frequency over BINS equal bins of [0, 1], weighted by their samples.

    Args: chances, outcomes [N], outcomes 0 or 1.   Returns: a scalar.
    """
    bins = (chances * BINS).long().clamp_max(BINS - 1)
    excess = torch.zeros(BINS, dtype=chances.dtype).index_add_(0, bins, chances - outcomes)
    return excess.abs().sum() / chances.shape[0]
