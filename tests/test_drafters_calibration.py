"""Sequential temperature scaling finds the temperatures that a head's logits were spoilt by."""

from __future__ import annotations

import pytest
import torch

from soloist.drafters.calibration import calibration_error, fit_temperatures

N = 40_000


def spoilt(temperatures: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of true chances, multiplied by a temperature a place, and accepted counts drawn by the true chances."""
    generator = torch.Generator().manual_seed(3)
    true = torch.randn(N, len(temperatures), generator=generator) * 1.5 + 1
    hits = torch.rand(true.shape, generator=generator) < torch.sigmoid(true)
    return true * torch.tensor(temperatures), hits.long().cumprod(1).sum(1)


def test_temperatures_are_recovered_and_the_error_falls() -> None:
    wanted = [2.0, 0.5, 1.0, 3.0]
    found = fit_temperatures(*spoilt(wanted))
    assert found.temperatures == pytest.approx(wanted, rel=0.2)
    assert max(found.errors_after) < 0.01 and max(found.errors_before) > 0.05
    assert all(a <= b + 1e-9 for a, b in zip(found.errors_after[:1], found.errors_before[:1], strict=True))
    assert found.num_samples == N


def test_true_chances_are_left_alone() -> None:
    found = fit_temperatures(*spoilt([1.0, 1.0]))
    assert found.temperatures == pytest.approx([1.0, 1.0], rel=0.13)


def test_error_is_the_distance_between_chance_and_frequency() -> None:
    chances = torch.tensor([0.9] * 10 + [0.1] * 10)
    outcomes = torch.tensor([1.0] * 9 + [0.0] + [1.0] * 5 + [0.0] * 5)
    assert float(calibration_error(chances, outcomes)) == pytest.approx(0.5 * 0.0 + 0.5 * 0.4)
    assert float(calibration_error(torch.ones(4), torch.ones(4))) == 0.0


def test_negative_control_late_places_that_were_not_verified_spoil_the_fit() -> None:
    logits, accepted = spoilt([1.0, 1.0, 1.0])
    found = fit_temperatures(logits, accepted.clamp_max(1))  # as if only one draft had been verified
    assert max(found.errors_after) > 0.2
