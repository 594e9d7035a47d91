"""Sequential temperature scaling: makes a confidence head's chances come true, place by place.

Source: the DSpark paper (arXiv 2607.05147); binned calibration error after Guo et al. (arXiv 1706.04599).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from soloist.errors import UserError
from soloist.weights.json_file import read_object_if_any

DSPARK_FILE, MTP_FILE = "calibration.json", "mtp-calibration.json"
"""In the folder of a DSpark drafter, and in the folder of a model with a NEXTN layer."""

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


def tempered(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Chances of confidence logits [K] by the temperatures [K] of their places."""
    return torch.sigmoid(logits / temperatures)


def read_temperatures(path: Path) -> list[float] | None:
    """What `write_calibration` left at `path`; None without such a file.   Raises: UserError for anything else there."""
    values = read_object_if_any(path).get("temperatures")
    if values is None:
        return None
    good = isinstance(values, list) and all(isinstance(t, float | int) and not isinstance(t, bool) and t > 0 for t in values)
    if not good or not values:
        raise UserError(f"{path}: temperatures must be a list of numbers above 0; fit them anew with `soloist train calibration`")
    return [float(t) for t in values]


def write_calibration(path: Path, found: Calibration, dataset: str) -> None:
    """Write the file that the engine reads. dataset: in words, what it was fitted on."""
    content = {
        "temperatures": [round(t, 4) for t in found.temperatures],
        "dataset": dataset,
        "num_samples": found.num_samples,
        "ece_before": [round(e, 4) for e in found.errors_before],
        "ece_after": [round(e, 4) for e in found.errors_after],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
