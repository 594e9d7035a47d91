"""The engine reads what training writes: a fresh export, and the shipped model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import soloist
from soloist import LLM
from soloist.train.dspark_model import load_drafter
from soloist.train.export import load_model, save_model
from soloist.train.model import Ling
from soloist.train.sources import SOURCES
from tests.naive_ling import NaiveLing
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
    share_alike = [name for name, entry in sources.items() if "-SA-" in entry["licence"]]
    assert share_alike == ["swi-prolog-doc"] and "CC BY-SA 3.0" in (NANO / "README.md").read_text()
    assert "swi-prolog-doc" not in {source.name for source in SOURCES}, "the next nano is trained without it"


PAGE = (
    "PostgreSQL indexes can be used to speed up queries. The following example shows how to create a B-tree index on a "
    "column:\n\n    CREATE INDEX name ON table (column);\n\nThe planner will use"
)


@pytest.mark.skipif(not (NANO / "config.json").exists(), reason="this checkout has no built-in model")
def test_transformers_gives_the_shipped_model_the_same_logits_up_to_fp32_rounding():
    """Logits reach 22, where one step of fp32 is 2e-6. Against fp64, which shares no code with either, transformers is
    2e-5 off at worst and the engine 3e-5, both below 5e-7 of the norm; so an absolute 1e-5 is finer than fp32 can keep.
    """
    transformers = pytest.importorskip("transformers", minversion="5.24")
    oracle, info = transformers.AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    with LLM(model=str(NANO), dtype="float32", device="cpu", drafter="none", context_length=128) as llm, torch.no_grad():
        ids = llm.encode(PAGE)
        ours, theirs = llm.logits(ids), oracle(torch.tensor([ids])).logits[0]
    tensors = {name: tensor.float().numpy() for name, tensor in load_file(NANO / "model.safetensors").items()}
    exact = NaiveLing(json.loads((NANO / "config.json").read_text()), tensors)(torch.tensor(ids)).logits
    assert _relative(ours, theirs) < 1e-6 and (ours - theirs).abs().max() < 1e-4
    assert _relative(ours, exact) < 1e-6 and _relative(theirs, exact) < 1e-6
    tensors["model.layers.0.attention.dt_bias"] = tensors["model.layers.0.attention.dt_bias"] + 1e-4
    moved = NaiveLing(json.loads((NANO / "config.json").read_text()), tensors)(torch.tensor(ids)).logits
    assert _relative(ours, moved) > 1e-6, "a decay that is off by a ten-thousandth must be noticed"
