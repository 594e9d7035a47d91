"""The DSpark drafter equals the published algorithm, for each head and format; its cache follows any acceptance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from soloist.config import MAX_WINDOW, SamplingParams
from soloist.drafters.drafter import Drafter, NoDraft
from soloist.drafters.dspark import DsparkDrafter, build_dspark
from soloist.drafters.width import FixedWidth, WidthChoice
from soloist.models.decoder import Output
from soloist.ops.noise import gumbel
from soloist.runtime.engine import Engine
from soloist.runtime.round import Parts
from soloist.state.buffers import Buffers
from soloist.state.sequence import Sequence
from soloist.weights.checkpoint import open_checkpoint
from tests import models, naive_dspark, speculate
from tests.dspark_files import FORMATS, write_drafter
from tests.naive_dspark import Facts
from tests.speculate import CONTEXT, PROMPT, Driven, Steered, V, run, tokens

KIND = "qwen3-deep"
HEADS = {
    "vanilla": Facts(), "gated": Facts(markov="gated"), "rnn": Facts(markov="rnn", confidence="hidden"),
    "no-confidence": Facts(confidence=None), "no-markov": Facts(markov=None, confidence="hidden"),
    "mha": Facts(kv_heads=4, layers=1, taps=(0, 2, 4), block=3),
    "infill": Facts(anchor_first=False, block=6),
    "dflash": Facts(markov=None, confidence=None, anchor_first=False, block=6),
    "sliding": Facts(reach=9, causal=True), "reduced": Facts(draft_ids=tuple(range(1, 100, 2))),
}  # fmt: skip
OF_FORMAT = {
    "deepspec": Facts(markov="rnn"), "specforge": HEADS["vanilla"], "dflash": HEADS["dflash"],
    "speculators": HEADS["reduced"], "speculators-dflash": HEADS["dflash"],
}  # fmt: skip


def load(folder: Path, width: int = 15, kind: type[DsparkDrafter] = DsparkDrafter) -> DsparkDrafter:
    built = build_dspark(open_checkpoint(folder), models.decoder(KIND), width)
    return kind(built.model, built.width, built.draft_ids, built.temperatures)


def served(
    drafter: Drafter, rejection: bool = False, chunk: int = 9, widths: WidthChoice | None = None
) -> Engine:
    model = models.decoder(KIND)
    state = Sequence(model.cache_specs(), CONTEXT, MAX_WINDOW, torch.device("cpu"))
    bufs = Buffers(V, CONTEXT + MAX_WINDOW + 1, torch.device("cpu"))
    return Engine(Parts(model, state, bufs, drafter), V, chunk, widths or FixedWidth(drafter.width), rejection)


def params(temperature: float = 0.0, count: int = 9) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=5, max_tokens=count)


def plain(temperature: float, count: int = 9) -> list[int]:
    return speculate.plain(KIND, params(temperature, count))


@torch.inference_mode()
def features(text: list[int], taps: tuple[int, ...]) -> torch.Tensor:
    model, state = models.decoder(KIND), models.sequence(KIND)
    out = model(torch.tensor(text), state.prefill_window(len(text), 0), state.caches, taps)
    return torch.cat(out.taps, -1)


def head_of() -> torch.Tensor:
    """The head's weight, which is packed by now: what it makes of unit vectors."""
    model = models.decoder(KIND)
    with torch.inference_mode():
        size = model.config.hidden_size
        return torch.cat([model.logits(rows) for rows in torch.eye(size).split(16)]).T


def assert_equals_naive(folder: Path, f: Facts, tensors: naive_dspark.Tensors) -> None:
    """Drafts and confidences of every round are those of the formulas."""
    drafter, answer = load(folder), plain(0.0)
    assert drafter.width == f.drafts and drafter.taps == f.taps
    steered = Steered(drafter, answer)
    driven = Driven(served(steered), params(), PROMPT)
    whole = features([*PROMPT, *answer], f.taps)
    head = tensors["lm_head.weight"] if f.draft_ids else head_of()
    close = rounds = 0
    while len(driven.text) < len(PROMPT) + 8:
        n = len(driven.text) - 1
        expected = naive_dspark.draft(f, tensors, models.decoder(KIND).embed.weight, head, whole[:n], driven.text[n])
        driven.round(f.drafts)
        rounds += 1
        if expected.lead < 1e-3:
            close += 1
            continue
        assert steered.proposed[-1] == expected.ids, n
        if f.confidence:
            assert drafter.confidence is not None
            torch.testing.assert_close(drafter.confidence, expected.chances.float(), rtol=1e-3, atol=1e-4)
        else:
            assert drafter.confidence is None
    assert rounds >= 3 and close <= 1


@pytest.mark.parametrize("name", HEADS)
def test_every_head_and_layout_equals_the_naive_law(name: str, tmp_path: Path) -> None:
    f = HEADS[name]
    assert_equals_naive(tmp_path, f, write_drafter(tmp_path, f, "speculators", 6))


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_equals_the_naive_law(form: str, tmp_path: Path) -> None:
    f = OF_FORMAT[form]
    assert_equals_naive(tmp_path, f, write_drafter(tmp_path, f, form, 6))


def test_what_training_exports_is_read(tmp_path: Path) -> None:
    train = pytest.importorskip("soloist.train.dspark_model")
    shape = train.DraftShape(64, V, (1, 3), 99, 6, num_key_value_heads=2, head_dim=16, intermediate_size=96,
                             block_size=5, markov_rank=8)  # fmt: skip
    trained = train.Drafter(shape)
    tensors = naive_dspark_tensors(trained.state_dict())
    trained.load_state_dict(tensors)
    report = {"temperatures": [1.0] * 5}
    train.save_drafter(trained, tmp_path, {"max_position_embeddings": 512}, report)
    assert_equals_naive(tmp_path, Facts(), tensors)


def naive_dspark_tensors(state: dict[str, torch.Tensor]) -> naive_dspark.Tensors:
    """Random values of the right shapes that bf16 holds exactly."""
    found = naive_dspark_random()
    assert set(found) == set(state), set(found) ^ set(state)
    return {name: tensor.bfloat16().float() for name, tensor in found.items()}


def naive_dspark_random() -> naive_dspark.Tensors:
    from tests.dspark_files import tensors_of

    return tensors_of(Facts())


WRONG = {
    "one layer on": {"aux_hidden_state_layer_ids": [3, 5]},
    "the other layout": {"sample_from_anchor": False},
    "another mask": {"mask_token_id": 98},
}


@pytest.mark.parametrize("name", WRONG)
def test_negative_control_a_misread_setting_is_caught(name: str, tmp_path: Path) -> None:
    tensors = write_drafter(tmp_path, Facts(), "speculators", 6, **WRONG[name])
    with pytest.raises(AssertionError):
        assert_equals_naive(tmp_path, Facts(), tensors)


def test_hidden_states_are_those_of_the_naive_law(tmp_path: Path) -> None:
    f = Facts()
    tensors = write_drafter(tmp_path, f, "deepspec", 6)
    drafter = load(tmp_path)
    driven = Driven(served(drafter), params(), PROMPT)
    parts, n = driven.served.parts, len(PROMPT)
    with torch.inference_mode():
        ids = torch.tensor([driven.text[n]] + [f.mask] * (f.block - 1))
        x = parts.model.embed.weight[ids]
        found = drafter.model.block(x, parts.sequence.window(f.block + 1, n + f.block + 1), drafter._caches)
    context = features(driven.text[:n], f.taps)
    expected = naive_dspark.draft(f, tensors, parts.model.embed.weight, head_of(), context, driven.text[n])
    assert (found - expected.hidden).norm() / expected.hidden.norm() < 1e-5


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_text_does_not_depend_on_the_drafter(temperature: float, tmp_path: Path) -> None:
    answer = plain(temperature)
    write_drafter(tmp_path / "large", Facts(block=15), "deepspec", 6)
    for width in range(1, 16):
        assert tokens(run(served(load(tmp_path / "large", width)), params(temperature))) == answer, width
    for name in ("rnn", "dflash", "reduced"):
        write_drafter(tmp_path / name, HEADS[name], "speculators", 6)
        assert tokens(run(served(Steered(load(tmp_path / name), answer)), params(temperature))) == answer, name


class Forgetful(DsparkDrafter):
    """Keeps the context of the first kept row of each round only."""

    def observe(self, out: Output, following: torch.Tensor, n: torch.Tensor) -> None:
        if out.window.prefill or out.window.width == 0:
            return super().observe(out, following, n)
        row = out.window.row(0)
        self.model.context(tuple(tap[:1] for tap in out.taps), row, self._caches)


def watched(folder: Path, kind: type[DsparkDrafter]) -> list[tuple[int, list[int], list[int]]]:
    return speculate.watch(load(folder, kind=kind), load(folder, kind=kind), served, params(), PROMPT)


@pytest.mark.parametrize("name", ["vanilla", "rnn", "dflash", "sliding"])
def test_watcher_proposals_are_those_of_a_fresh_drafter_fed_token_by_token(name: str, tmp_path: Path) -> None:
    write_drafter(tmp_path, HEADS[name], "speculators", 6)
    found = watched(tmp_path, DsparkDrafter)
    assert len({emitted for emitted, _, _ in found}) > 2, "the acceptance was not mixed"
    for emitted, proposed, fresh in found:
        assert proposed == fresh, emitted


def test_negative_control_a_context_with_holes_is_caught_by_the_watcher(tmp_path: Path) -> None:
    write_drafter(tmp_path, Facts(), "deepspec", 6)
    assert any(proposed != fresh for _, proposed, fresh in watched(tmp_path, Forgetful))


def test_a_narrower_proposal_is_the_beginning_of_the_whole_one(tmp_path: Path) -> None:
    write_drafter(tmp_path, HEADS["rnn"], "deepspec", 6)
    drafter = load(tmp_path)
    driven = Driven(served(drafter), params(), PROMPT)
    whole = speculate.proposal(driven.served, 5)
    for width in range(1, 5):
        assert speculate.proposal(driven.served, width) == whole[:width]


def test_sampled_drafts_follow_their_law_and_the_noise_of_their_place(tmp_path: Path) -> None:
    write_drafter(tmp_path, HEADS["reduced"], "speculators", 6)
    drafter = load(tmp_path)
    driven = Driven(served(drafter, rejection=True), params(0.8), PROMPT)
    drafts = speculate.proposal(driven.served, 5, draw=driven._sampler.draft)
    assert drafter.law is not None and drafter.law.shape == (5, V)
    places = torch.arange(len(PROMPT), len(PROMPT) + 5) + 1
    noise = gumbel(places, driven.served.parts.bufs.seed, V)
    assert (drafter.law.log() + noise).argmax(-1).tolist() == drafts
    unknown = [token for token in range(V) if token not in HEADS["reduced"].draft_ids]
    assert not drafter.law[:, unknown].any()


def test_calibration_divides_the_confidence_logits(tmp_path: Path) -> None:
    write_drafter(tmp_path, Facts(), "deepspec", 6)
    raw = load(tmp_path)
    (tmp_path / "calibration.json").write_text(json.dumps({"temperatures": [1.0, 2.0, 0.5, 4.0, 1.5]}))
    calibrated = load(tmp_path)
    for drafter in (raw, calibrated):
        speculate.proposal(Driven(served(drafter), params(), PROMPT).served, 5)
    assert raw.confidence is not None and calibrated.confidence is not None
    expected = torch.sigmoid(torch.logit(raw.confidence) / torch.tensor([1.0, 2.0, 0.5, 4.0, 1.5]))
    torch.testing.assert_close(calibrated.confidence, expected)


def test_without_a_drafter_nothing_changes() -> None:
    assert tokens(run(served(NoDraft()), params())) == plain(0.0)
