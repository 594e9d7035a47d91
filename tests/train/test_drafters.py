"""Training of MTP and DSpark on a tiny target, and the replay that measures them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from soloist.errors import UserError
from soloist.train import dspark, features
from soloist.train.acceptance import mean_length, ngram_proposals, replay
from soloist.train.calibration import calibrate
from soloist.train.dspark import DsparkTask, draft_shape, dspark_proposals, train_dspark
from soloist.train.dspark_model import Drafter, DraftShape, load_drafter, save_drafter
from soloist.train.features import Features
from soloist.train.model import Ling
from soloist.train.mtp import chain, mtp_proposals, train_mtp
from soloist.train.sample import Sequences, generate
from tests.train.shapes import TINY

SHAPE = replace(TINY, vocab_size=40)


@pytest.fixture(scope="module")
def target() -> Ling:
    model = Ling(SHAPE, seed=2)
    with torch.no_grad():
        model.lm_head.weight.mul_(30)  # confident choices, so that greedy text is no coin toss
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def texts(target: Ling) -> Sequences:
    prompts = [[i, (3 * i) % 40, 7] for i in range(1, 9)]
    return generate(target, prompts, width=40, stop_ids=(39,), temperatures=[0.0] * 8)


def test_generated_text_is_the_greedy_text(target, texts):
    with torch.no_grad():
        best = target(texts.ids).argmax(-1)
    for row in range(len(texts)):
        low, high = int(texts.prompt[row]), int(texts.end[row])
        assert torch.equal(best[row, low - 1 : high - 1], texts.ids[row, low:high])


def test_the_same_seed_gives_the_same_sampled_text(target):
    def draw(seed: int) -> torch.Tensor:
        return generate(target, [[1, 2]] * 4, 20, (39,), [1.0] * 4, seed=seed).ids

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_a_chain_equals_the_layer_run_row_by_row(target, texts):
    ids = texts.ids[:2]
    with torch.no_grad():
        hidden = target.hidden(ids)[0]
        states = chain(target, hidden[:, :-1], ids[:, 1:], 3)
        for start in (0, 5, 20):
            rows_h, rows_t = hidden[:, : start + 1], ids[:, 1 : start + 2]
            for step in range(3):
                out, _ = target.mtp.predict(target.model.word_embeddings(rows_t), rows_h)
                assert torch.allclose(out[:, -1], states[step][:, start], atol=1e-5), (start, step)
                drafted = target.lm_head(out[:, -1]).argmax(-1)
                rows_h, rows_t = torch.cat([rows_h, out[:, -1:]], 1), torch.cat([rows_t, drafted[:, None]], 1)


def test_a_block_sees_only_the_past_of_its_anchor(target, texts):
    drafter = Drafter(DraftShape(32, 40, (0, 2), 38, 4))
    with torch.no_grad():
        for p in drafter.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))

        def slots(ids: torch.Tensor) -> torch.Tensor:
            _, tapped, _ = target.hidden(ids, (0, 2))
            return drafter.blocks(target.model.word_embeddings.weight, drafter.context(tapped), ids, torch.tensor([[10, 20]]))

        ids = texts.ids[:1].clone()
        before = slots(ids)
        ids[:, 11:] = 5
        after = slots(ids)
    assert torch.allclose(before[:, 0], after[:, 0], atol=1e-6)
    assert not torch.allclose(before[:, 1], after[:, 1], atol=1e-3)


def test_replay_accepts_an_oracle_fully_and_garbage_never():
    ids = list(range(30))
    oracle = [[n + 1 + k for k in range(4)] for n in range(30)]
    emitted, accepted = replay(ids, oracle, 4, 30)
    assert emitted >= 25 and accepted == [4, 4, 4, 4, 4]
    emitted, accepted = replay(ids, [[99] * 4] * 30, 4, 30)
    assert emitted == 25 and accepted == [0] * 25


def test_prompt_lookup_is_replayed_as_the_engine_proposes():
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 8]])
    looped = Sequences(ids, torch.tensor([2]), torch.tensor([12]))
    assert mean_length(ids, ngram_proposals(looped, 3), looped.prompt, looped.end)[0] == pytest.approx(9 / 4)
    fresh = Sequences(torch.arange(12)[None], looped.prompt, looped.end)
    assert mean_length(fresh.ids, ngram_proposals(fresh, 3), fresh.prompt, fresh.end)[0] == 1


def test_losses_in_parts_are_the_losses_of_the_whole(target, texts, monkeypatch):
    def run() -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        task = DsparkTask(target, Drafter(DraftShape(32, 40, (0, 2), 38, 4)), texts, 2, 4, 1e-3, 0)
        losses = task.losses(0)
        losses["loss"].backward()
        return losses, [p.grad for p in task.module.parameters() if p.grad is not None]

    whole, gradients = run()
    monkeypatch.setattr(dspark, "CPU_LOGITS_BYTES", 3 * 7 * 40 * 4)
    parts, others = run()
    assert all(torch.allclose(whole[name], parts[name], rtol=1e-5) for name in whole)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(gradients, others, strict=True))


def test_features_that_were_kept_are_those_of_the_target(target, texts, monkeypatch):
    pick = torch.tensor([3, 0])
    kept = Features(target, texts, (0, 2))
    monkeypatch.setattr(features, "SHARE", 0.0)
    online = Features(target, texts, (0, 2))
    assert kept.kept is not None and online.kept is None
    (hidden, tapped), (again, others) = kept.rows(pick), online.rows(pick)
    assert torch.allclose(hidden, again, atol=1e-5) and len(tapped) == 2
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(tapped, others, strict=True))
    assert not torch.allclose(hidden, kept.rows(torch.tensor([0, 3]))[0], atol=1e-3)


def test_training_makes_drafts_the_target_accepts(target, texts, tmp_path):
    drafter = train_dspark(
        target,
        texts,
        tmp_path / "dspark",
        replace(draft_shape(target, 38), target_layer_ids=(0, 2), markov_rank=8),
        steps=220,
        batch=4,
        anchors=16,
        lr=8e-3,
        say=lambda line: None,
    )
    drafts, sure = dspark_proposals(target, drafter, texts)
    length, _ = mean_length(texts.ids, drafts, texts.prompt, texts.end)
    untrained, _ = dspark_proposals(target, Drafter(drafter.shape), texts)
    before, _ = mean_length(texts.ids, untrained, texts.prompt, texts.end)
    assert length > 2.5 > before, (length, before)
    report = calibrate(texts, drafts, sure)
    assert len(report["temperatures"]) == 7
    assert sum(report["ece_after"]) <= sum(report["ece_before"]) + 1e-9
    save_drafter(drafter, tmp_path / "out", {"max_position_embeddings": 64}, report)
    again, _ = dspark_proposals(target, load_drafter(tmp_path / "out"), texts)
    assert (again == drafts).float().mean() > 0.9


def test_mtp_training_raises_its_acceptance(target, texts, tmp_path):
    before, _ = mean_length(texts.ids, mtp_proposals(target, texts, 3), texts.prompt, texts.end)
    trained = Ling(SHAPE).requires_grad_(False)
    trained.load_state_dict(target.state_dict())
    trained.mtp.load_state_dict(
        train_mtp(target, texts, tmp_path, steps=120, batch=4, lr=5e-3, say=lambda line: None).state_dict()
    )
    after, _ = mean_length(texts.ids, mtp_proposals(trained, texts, 3), texts.prompt, texts.end)
    assert after > before + 0.3, (before, after)


def test_tapping_the_last_layer_is_refused():
    with pytest.raises(UserError, match="last layer"):
        DraftShape(32, 40, (0, 3), 38, 4)


def test_drafter_losses_do_not_train_the_target(target, texts):
    task = DsparkTask(target, Drafter(DraftShape(32, 40, (0, 2), 38, 4)), texts, 2, 4, 1e-3, 0)
    task.losses(0)["loss"].backward()
    assert all(p.grad is None for p in target.parameters())
    assert all(p.grad is not None for n, p in task.module.named_parameters() if "markov_w1" not in n)
