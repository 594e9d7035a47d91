"""Every family equals the independent implementations: logits, layer outputs, router choices and greedy ids.

The golden files were made with transformers and with tests/naive_ling.py; none of that is needed here.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from soloist.layers.linear import Stream
from soloist.models.decoder import MtpLayer
from soloist.ops.rms_norm import rms_norm
from soloist.state.sequence import Sequence
from soloist.testing.checkpoints import random_tensors, save_checkpoint
from tests.golden import ours
from tests.golden.cases import (
    FOLDER,
    GREEDY_PROMPTS,
    GREEDY_TOKENS,
    KINDS,
    LENGTH,
    PROMPT,
    ROWS,
    assert_equal,
    config_of,
    difference,
    fingerprint,
    golden,
    text,
)

rows = list(ROWS)
decode_rows = [row - PROMPT for row in ROWS if row >= PROMPT]


def routes_of(kind: str) -> list[np.ndarray]:
    """Golden choices [LENGTH, K] of every routed layer in turn."""
    found = golden(kind)
    names = sorted((name for name in found if name.startswith("routes_")), key=lambda name: int(name[7:]))
    return [found[name] for name in names]


def assert_same_routes(run: ours.Run, kind: str, start: int = 0) -> None:
    expected = routes_of(kind)
    assert len(run.routes) == len(expected)
    for i, (found, wanted) in enumerate(zip(run.routes, expected, strict=True)):
        assert np.array_equal(found.numpy(), wanted[start:]), f"routed layer {i}"


def test_golden_files_belong_to_these_checkpoints() -> None:
    made = json.loads((FOLDER / "provenance.json").read_text())["checkpoints"]
    assert {kind: entry["fingerprint"] for kind, entry in made.items()} == {k: fingerprint(k) for k in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_full_prefill_equals_the_reference(kind: str) -> None:
    run = ours.prefill(ours.decoder(kind), text(kind), LENGTH)
    for i, stream in enumerate(run.layers):
        assert_equal(stream[rows], golden(kind)["layers"][i], f"{kind}, output of layer {i}")
    assert_equal(run.logits[rows], golden(kind)["logits"], f"{kind}, logits")
    assert np.array_equal(run.logits.argmax(-1).numpy(), golden(kind)["argmax"])
    assert_same_routes(run, kind)


@pytest.mark.parametrize("chunk", [7, 64, 128, 149])
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_in_chunks_equals_the_reference(kind: str, chunk: int) -> None:
    run = ours.prefill(ours.decoder(kind), text(kind), chunk)
    assert_equal(run.logits[rows], golden(kind)["logits"], f"{kind}, logits")
    for i, stream in enumerate(run.layers):
        assert_equal(stream[rows], golden(kind)["layers"][i], f"{kind}, output of layer {i}")
    assert_same_routes(run, kind)


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_step_by_step_equals_the_reference(kind: str, width: int) -> None:
    run = ours.decode(ours.decoder(kind), text(kind), PROMPT, width)
    assert_equal(run.logits[decode_rows], golden(kind)["decode_logits"], f"{kind}, logits")
    if kind != "llama-dynamic":  # its earlier keys were turned for a shorter text, so later streams differ by law
        for i, stream in enumerate(run.layers):
            expected = golden(kind)["layers"][i][-len(decode_rows) :]
            assert_equal(stream[decode_rows], expected, f"{kind}, output of layer {i}")
    assert_same_routes(run, kind, PROMPT)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_ids_equal_the_reference(kind: str) -> None:
    for length in GREEDY_PROMPTS:
        found = ours.greedy(ours.decoder(kind), text(kind)[:length], GREEDY_TOKENS)
        assert found == golden(kind)[f"greedy_{length}"].tolist(), (kind, length)


@torch.inference_mode()
def test_mtp_layer_equals_the_naive_law() -> None:
    """Wired as the drafter wires it: embedding half first, its own latent cache, hidden states after the final norm."""
    model, ids = ours.decoder("ling-mtp"), text("ling-mtp")
    state = ours.fresh(model, LENGTH)
    window = state.prefill_window(LENGTH, 0)
    hidden = model(ids, window, state.caches).hidden[:-1]
    layer = model.mtp[0]
    assert isinstance(layer, MtpLayer)
    own = Sequence(layer.layer.mixer.cache_specs(), 256, 16, torch.device("cpu"))
    own.reset(LENGTH - 1)
    place = own.prefill_window(LENGTH - 1, 0)
    eps = model.config.norm_eps
    embedding = rms_norm(model.embed.weight[ids[1:]], layer.embed_norm.weight, eps)
    joined = layer.in_proj(torch.cat((embedding, rms_norm(hidden, layer.hidden_norm.weight, eps)), -1))
    rotation = model.rotaries[layer.layer.rope].tables(place.positions, place.base_length)
    residual, branch = layer.layer(Stream(joined), place, own.caches, rotation)
    logits = model.logits(rms_norm(residual + branch, layer.final_norm.weight, eps))
    expected = golden("ling-mtp")["mtp_logits"]
    assert_equal(logits[[row for row in ROWS if row < LENGTH - 1]], expected, "MTP logits")


PERTURBED = {
    "ling-flash": "model.layers.1.attention.dt_bias",
    "ling-tiny": "model.layers.3.attention.q_a_layernorm.weight",
    "ling-clamped": "model.layers.4.mlp.shared_experts.up_proj.weight",
    "llama": "model.layers.2.mlp.down_proj.weight",
    "qwen3-moe": "model.layers.0.self_attn.k_norm.weight",
}


@pytest.mark.parametrize("kind", PERTURBED)
def test_negative_control_one_changed_number_is_caught(kind: str, tmp_path: Path) -> None:
    tensors = random_tensors(config_of(kind))
    tensors[PERTURBED[kind]].reshape(-1)[0] += 0.05
    save_checkpoint(tmp_path, config_of(kind), tensors)
    run = ours.prefill(ours.load(tmp_path), text(kind), LENGTH)
    assert not difference(run.logits[rows], golden(kind)["logits"]).small


MISREAD = {
    "ling-flash": {"kda_lower_bound": -4.999},
    "ling-clamped": {"share_expert_swiglu_limit_list": [0] * 6},
    "ling-tiny": {"routed_scaling_factor": 2.501},
    "ling-yarn": {"rope_scaling": None},
    "ling-mtp": {"topk_group": 3},
    "llama": {"rms_norm_eps": 1e-6},
    "llama-llama3": {"rope_scaling": None},
    "llama-linear": {"rope_scaling": None},
    "llama-dynamic": {"rope_scaling": None},
    "llama-yarn": {"rope_scaling": None},
    "qwen3": {"rope_theta": 1000100},
    "qwen3-moe": {"norm_topk_prob": False},
}


@pytest.mark.parametrize("kind", MISREAD)
def test_negative_control_one_misread_setting_is_caught(kind: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, {**config_of(kind), **MISREAD[kind]}, random_tensors(config_of(kind)))
    run = ours.prefill(ours.load(tmp_path), text(kind), LENGTH)
    assert not difference(run.logits[rows], golden(kind)["logits"]).small


@pytest.mark.parametrize("fault", [float("nan"), 1.0])
def test_negative_control_one_wrong_value_among_all_is_caught(fault: float) -> None:
    expected = golden("ling-flash")["logits"]
    found = expected.copy()
    found[3, 7] = fault
    assert difference(expected, expected).small
    assert not difference(found, expected).small
