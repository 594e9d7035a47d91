"""The engine reads what training writes: a fresh export, and the shipped model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import soloist
from soloist import LLM
from soloist.train.dspark_model import load_drafter
from soloist.train.export import load_model, save_model
from soloist.train.model import Ling
from tests.train.test_export import TINY

NANO = Path(soloist.__file__).parent / "nano"


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_a_fresh_export_gives_the_same_logits_in_the_engine(tmp_path):
    save_model(Ling(TINY, seed=5), tmp_path, max_length=128, eos=1, pad=0)
    stored, ids = load_model(tmp_path), list(range(3, 60))
    llm = LLM(model=str(tmp_path), dtype="float32", device="cpu", drafter="none")
    with torch.no_grad():
        assert _relative(llm.logits(ids), stored(torch.tensor([ids]))[0]) < 1e-4
        stored.model.norm.weight[3] += 1.0
        assert _relative(llm.logits(ids), stored(torch.tensor([ids]))[0]) > 1e-3, "a changed weight must be noticed"
    llm.close()


@pytest.mark.skipif(not (NANO / "config.json").exists(), reason="this checkout has no built-in model")
def test_the_shipped_model_is_whole_and_small():
    assert sum(f.stat().st_size for f in NANO.rglob("*") if f.is_file()) < 60e6
    model, drafter = load_model(NANO), load_drafter(NANO / "dspark")
    assert drafter.shape.hidden_size == model.shape.hidden_size and drafter.shape.vocab_size == model.shape.vocab_size
    sources = json.loads((NANO / "corpus.json").read_text())["sources"]
    assert len(sources) > 20 and all(entry["licence"] for entry in sources.values())
