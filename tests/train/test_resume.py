"""Training is a pure function of data, seed and step."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from soloist.train.data import Batches, Documents
from soloist.train.loop import Schedule, fit
from soloist.train.model import Ling
from soloist.train.nano import NanoTask
from tests.train.shapes import TINY

SHAPE = replace(TINY, num_hidden_layers=2)
SCHEDULE = Schedule(lr=3e-3, steps=12)


def _task() -> NanoTask:
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 60, 80).astype(np.uint32)
    # the next token is a function of this one, so that there is something to learn
    ids = np.concatenate([(rng.integers(0, 64) + 5 * np.arange(n)) % 64 for n in lengths]).astype(np.uint16)
    return NanoTask(Ling(SHAPE, seed=1), Batches(Documents(ids, lengths), batch=2, length=24, seed=5), lr=SCHEDULE.lr)


def _curve(points):
    return [(p["step"], p["loss"]) for p in points]


def test_resumed_training_follows_the_uninterrupted_curve(tmp_path):
    quiet = lambda line: None  # noqa: E731
    whole_task = _task()
    whole = fit(whole_task, SCHEDULE, tmp_path / "whole", log_every=1, say=quiet)
    first = fit(_task(), SCHEDULE, tmp_path / "cut", log_every=1, stop_after=5, say=quiet)
    resumed_task = _task()
    second = fit(resumed_task, SCHEDULE, tmp_path / "cut", log_every=1, say=quiet)
    assert _curve(first) + _curve(second) == _curve(whole)
    for name, tensor in whole_task.module.state_dict().items():
        assert torch.equal(tensor, resumed_task.module.state_dict()[name]), name


def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(tmp_path):
    quiet = lambda line: None  # noqa: E731
    whole_task = _task()
    whole = fit(whole_task, SCHEDULE, tmp_path / "whole", log_every=1, say=quiet)
    killed = _task()
    losses = killed.losses

    def dies(step: int) -> dict[str, torch.Tensor]:
        if step == 7:
            raise KeyboardInterrupt
        return losses(step)

    killed.losses = dies
    with pytest.raises(KeyboardInterrupt):
        fit(killed, SCHEDULE, tmp_path / "cut", log_every=1, save_every=5, say=quiet)
    resumed_task = _task()
    second = fit(resumed_task, SCHEDULE, tmp_path / "cut", log_every=1, say=quiet)
    assert _curve(second) == _curve(whole)[5:]
    logged = [json.loads(line) for line in (tmp_path / "cut" / "log.jsonl").read_text().splitlines()]
    assert _curve(logged) == _curve(whole), "every step once"
    for name, tensor in whole_task.module.state_dict().items():
        assert torch.equal(tensor, resumed_task.module.state_dict()[name]), name


def test_training_lowers_the_loss(tmp_path):
    points = fit(_task(), Schedule(lr=1e-2, steps=60), tmp_path, log_every=1, say=lambda line: None)
    assert points[-1]["loss"] < 0.8 * points[0]["loss"]


def test_another_seed_gives_another_curve(tmp_path):
    other = _task()
    other.batches.seed = 6
    a = fit(_task(), SCHEDULE, tmp_path / "a", log_every=1, stop_after=2, say=lambda line: None)
    b = fit(other, SCHEDULE, tmp_path / "b", log_every=1, stop_after=2, say=lambda line: None)
    assert _curve(a) != _curve(b)
