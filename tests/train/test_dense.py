"""Llama and Qwen3 as targets: batches against the engine, and a whole run from an empty folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from soloist import LLM, SamplingParams
from soloist.cli import main
from soloist.errors import UserError
from soloist.models.registry import load_decoder, read_config
from soloist.state.sequence import Sequence
from soloist.testing.checkpoints import write_checkpoint
from soloist.train.acceptance import mean_length
from soloist.train.dense import Dense
from soloist.train.dspark import draft_shape, dspark_proposals, train_dspark
from soloist.train.dspark_model import load_drafter, save_drafter
from soloist.train.material import Settings
from soloist.train.prompts import invented_prompts
from soloist.train.sample import write
from soloist.train.target import load_subject
from soloist.weights.checkpoint import open_checkpoint

KINDS = ("llama", "qwen3")
CPU = torch.device("cpu")
IDS = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(4))


@pytest.fixture(params=KINDS)
def folder(request, tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / request.param, request.param, tokenizer=True)


def dense(folder: Path) -> Dense:
    target = load_subject(str(folder), CPU).target
    assert isinstance(target, Dense)
    return target


def test_a_batch_gives_the_logits_of_the_engine(folder):
    target = dense(folder)
    ours = target.hidden(IDS)[0] @ target.head.T
    with LLM(str(folder), dtype="float32", device="cpu", drafter="none") as llm:
        theirs = torch.stack([llm.logits(row.tolist()) for row in IDS])
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    target.decoder.norm.weight[3] += 1.0
    assert not torch.allclose(target.hidden(IDS)[0] @ target.head.T, theirs, rtol=1e-3, atol=1e-3)


def test_one_step_at_a_time_equals_the_whole_sequence(folder):
    target = dense(folder)
    whole = target.hidden(IDS)[0] @ target.head.T
    state = target.empty_state(2, IDS.shape[1])
    steps = torch.stack([target.step(IDS[:, t], state, torch.tensor([t])) for t in range(IDS.shape[1])], 1)
    assert torch.allclose(whole, steps, rtol=1e-4, atol=1e-4)


def test_tapped_layers_are_the_streams_that_the_engine_hands_to_drafters(folder):
    tapped = dense(folder).hidden(IDS[:1], (0, 1))[1]
    checkpoint = open_checkpoint(folder)
    decoder = load_decoder(checkpoint, read_config(checkpoint.config), torch.float32, CPU)
    state = Sequence(decoder.cache_specs(), 64, 16, CPU)
    state.reset(0)
    theirs = decoder(IDS[0], state.prefill_window(40, 0), state.caches, (0, 1)).taps
    assert all(torch.allclose(own[0], their, atol=1e-4) for own, their in zip(tapped, theirs, strict=True))
    assert not torch.allclose(tapped[0][0], theirs[1], atol=1e-2)


def test_the_target_writes_what_the_engine_writes(folder):
    prompts = [row[:6].tolist() for row in IDS]
    texts = write(dense(folder), prompts, 24, (), 0)
    with LLM(str(folder), dtype="float32", device="cpu", drafter="none") as llm:
        asked = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)
        assert texts.ids[:, 6:].tolist() == [llm.generate(prompt, asked).token_ids for prompt in prompts]


def test_a_model_without_a_chat_template_begins_texts(folder):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    asked = invented_prompts(load_subject(str(folder), CPU), 3, 0, 100)
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": None}))
    begun = invented_prompts(load_subject(str(folder), CPU), 3, 0, 100)
    turn = load_subject(str(folder), CPU).tokenizer.token_id("<|im_start|>")
    assert all(prompt.count(turn) >= 2 for prompt in asked) and not any(prompt.count(turn) >= 2 for prompt in begun)


def test_what_cannot_be_trained_is_one_line(tmp_path, capsys):
    llama, bare = write_checkpoint(tmp_path / "llama", "llama", tokenizer=True), write_checkpoint(tmp_path / "bare", "llama")
    experts = write_checkpoint(tmp_path / "experts", "qwen3-moe", tokenizer=True)
    for what, model, word in (("mtp", llama, "NEXTN"), ("dspark", bare, "tokenizer"), ("dspark", experts, "other layers")):
        assert main(["train", what, "--model", str(model), "--device", "cpu"]) == 2
        assert word in capsys.readouterr().err
    with pytest.raises(UserError, match="batch=0"):
        Settings("nano", batch=0)


def arguments(folder: Path, out: Path, *more: str) -> list[str]:
    questions = out.parent / "questions.jsonl"
    questions.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("Why?", "Who asked the old man?")))
    return ["train", "dspark", "--model", str(folder), "--out", str(out), "--work", str(out / "work"), "--texts", "12",
            "--width", "160", "--held-out", str(questions), "--measured", "2", "--answer", "48", "--steps", "30", "--batch", "4",
            "--anchors", "8", "--device", "cpu", *more]  # fmt: skip


def test_an_empty_folder_becomes_a_drafter_that_the_engine_runs(folder, tmp_path, capsys):
    out = tmp_path / "drafter"
    assert main(arguments(folder, out)) == 0
    card = json.loads((out / "acceptance.json").read_text())
    assert card["texts"] == 12 and card["dspark"]["average"] >= 1 and card["ngram"]["questions"]["prompts"] == 2
    assert len(json.loads((out / "calibration.json").read_text())["temperatures"]) == 7
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(str(folder), device="cpu", drafter="dspark", drafter_path=str(out)) as llm:
        assert llm.generate("Every morning", params).token_ids == llm.plain().generate("Every morning", params).token_ids
    capsys.readouterr()
    assert main(arguments(folder, out)) == 0
    again = json.loads((out / "acceptance.json").read_text())
    assert again["dspark"] == card["dspark"] and "the target writes" not in capsys.readouterr().out, "nothing is done twice"
    assert main(arguments(folder, out, "--seed", "1")) == 2
    assert "texts of another run" in capsys.readouterr().err


def test_training_makes_drafts_that_the_engine_accepts_as_often_as_was_measured(tmp_path):
    folder = write_checkpoint(tmp_path / "llama", "llama", tokenizer=True, num_hidden_layers=4, tie_word_embeddings=False)
    subject = load_subject(str(folder), CPU)
    prompts = [row[:6].tolist() for row in IDS]
    texts = write(subject.target, prompts, 56, (), 0)
    shape = replace(draft_shape(subject.target, subject.mask_token_id), markov_rank=16)
    drafter = train_dspark(subject.target, texts, tmp_path / "work", shape, steps=120, batch=2, anchors=16, lr=8e-3,
                           say=lambda line: None)  # fmt: skip
    save_drafter(drafter, tmp_path / "drafter", subject.config)
    stored = load_drafter(tmp_path / "drafter")
    drafts = dspark_proposals(subject.target, stored, texts)[0]
    measured = [mean_length(*(x[i : i + 1] for x in (texts.ids, drafts, texts.prompt, texts.end)))[0] for i in range(2)]
    asked = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    with LLM(str(folder), dtype="float32", device="cpu", drafter="dspark", drafter_path=str(tmp_path / "drafter"),
             draft_width=7) as llm:  # fmt: skip
        found = [llm.generate(prompt, asked).timings.acceptance_length for prompt in prompts]
    assert found == pytest.approx(measured, rel=0.02) and min(found) > 2, (found, measured)
