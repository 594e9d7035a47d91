"""`soloist train mtp` from a folder without a NEXTN layer to one that the engine speculates with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from soloist import LLM, SamplingParams
from soloist.cli import main
from soloist.testing.tokenizer import VOCAB_SIZE, write_tokenizer
from soloist.train.data import Documents
from soloist.train.export import save_model
from soloist.train.material import SHARES, made_from
from soloist.train.model import Ling
from tests.train.shapes import TINY

SHAPE = replace(TINY, num_hidden_layers=2, vocab_size=VOCAB_SIZE, num_nextn_predict_layers=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = tmp_path / "model"
    out.mkdir()
    fields = write_tokenizer(out)
    save_model(Ling(SHAPE, seed=2), out, max_length=512, eos=fields["eos_token_id"], pad=fields["pad_token_id"])
    return out


def arguments(folder: Path, what: str, work: Path) -> list[str]:
    questions = folder.parent / "questions.jsonl"
    questions.write_text(json.dumps({"text": "Every morning the baker"}) + "\n")
    return ["train", what, "--model", str(folder), "--work", str(work), "--texts", "13", "--width", "160", "--held-out",
            str(questions), "--measured", "2", "--answer", "24", "--steps", "3", "--batch", "2", "--anchors", "4",
            "--device", "cpu"]  # fmt: skip


def test_a_model_without_a_nextn_layer_is_given_one(folder, tmp_path):
    grown = tmp_path / "grown"
    assert main([*arguments(folder, "mtp", tmp_path / "work"), "--out", str(grown)]) == 0
    card = json.loads((grown / "acceptance.json").read_text())
    assert "mtp_before" not in card and card["mtp"]["average"] >= 1
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(str(grown), device="cpu", dtype="float32", drafter="mtp", context_length=128) as llm:
        output = llm.generate("Every morning", params)
    with LLM(str(folder), device="cpu", dtype="float32", drafter="none", context_length=128) as llm:
        assert output.token_ids == llm.generate("Every morning", params).token_ids
    assert output.timings.drafted > 0
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 0, "the model itself stays"


def test_a_model_that_was_trained_here_is_asked_about_its_own_corpus(folder, tmp_path):
    work = tmp_path / "work"
    assert not made_from(folder, work)
    (work / "tokenizer").mkdir(parents=True)
    (work / "tokenizer" / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert made_from(folder, work)
    rng = np.random.default_rng(0)
    for split in ("train", "heldout"):
        for domain in SHARES:
            lengths = np.full(8, 60, np.uint32)
            Documents(rng.integers(3, 300, 480).astype(np.uint16), lengths).save(work / f"{split}-{domain}.npz")
    main(arguments(folder, "dspark", work))
    card = json.loads((folder / "dspark" / "acceptance.json").read_text())
    assert {"docs", "code"} <= set(card["dspark"]), "held-out pages, and not the questions of the command line"
