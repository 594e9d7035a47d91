"""`soloist train calibration` fits a drafter's confidence and leaves it where the engine finds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from soloist.cli import main
from soloist.config import EngineConfig
from soloist.runtime.assemble import assemble
from soloist.testing.checkpoints import write_checkpoint
from soloist.weights.checkpoint import open_checkpoint
from tests.dspark_files import write_drafter
from tests.naive_dspark import Facts

FILES = {"mtp": "mtp-calibration.json", "dspark": "dspark/calibration.json"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = write_checkpoint(tmp_path / "model", "ling-mtp")
    write_drafter(path / "dspark", Facts(), "deepspec", 6)
    rows = [{"token_ids": list(range(i, i + 9))} for i in range(4)]
    (path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


def calibrate(folder: Path, drafter: str, *flags: str) -> int:
    prompts = f"file:{folder / 'prompts.jsonl'}"
    return main(["train", "calibration", "--model", str(folder), "--drafter", drafter, "--prompts", prompts, *flags])


def drafter_of(folder: Path, name: str) -> Any:
    checkpoint = open_checkpoint(folder)
    return assemble(EngineConfig(str(folder), drafter=name, context_length=64), checkpoint).engine.parts.drafter


@pytest.mark.parametrize("name", FILES)
def test_the_engine_reads_what_was_fitted(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = drafter_of(folder, name).temperatures
    assert torch.equal(before, torch.ones_like(before))
    assert calibrate(folder, name, "--max-tokens", "24") == 0
    card = json.loads(capsys.readouterr().out)
    assert card["file"] == str(folder / FILES[name]) and card["rounds"] >= 50
    found = drafter_of(folder, name).temperatures
    assert found.tolist() == pytest.approx(card["temperatures"], abs=1e-4)
    assert not torch.equal(found, before), "a random drafter is not calibrated"
    assert card["ece_after"][0] < card["ece_before"][0]
    written = json.loads((folder / FILES[name]).read_text())
    assert written["num_samples"] == card["rounds"] and "4 answers" in written["dataset"]


def test_what_cannot_be_calibrated_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate(folder, "ngram") == 2
    assert "has no confidence to calibrate; choose mtp or dspark" in capsys.readouterr().err
    assert calibrate(folder, "mtp", "--max-tokens", "3") == 2
    assert "50 are needed; raise --num-prompts or --max-tokens" in capsys.readouterr().err
    assert calibrate(folder, "mtp", "--max-tokens", "24", "--out", str(folder / "no" / "such")) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert not list(folder.rglob("*calibration.json"))
