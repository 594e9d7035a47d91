"""A checkpoint that cannot be run as it stands is refused in one line that names what is wrong with it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from soloist.errors import UserError
from soloist.models.registry import load_decoder, read_config
from soloist.testing.checkpoints import random_tensors, save_checkpoint, write_checkpoint
from soloist.testing.configs import CONFIGS
from soloist.weights.checkpoint import open_checkpoint

Tensors = dict[str, np.ndarray]
NORM = "model.layers.1.input_layernorm.weight"
ONE_OF_EACH = ("ling-mtp", "llama", "smollm", "qwen3-moe")


def load(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    try:
        config = read_config(checkpoint.config)
        load_decoder(checkpoint, config, torch.float32, torch.device("cpu"))
    finally:
        checkpoint.close()


def refusal(action: Callable[[], Any]) -> str:
    """The message with which an action is refused; it must be one readable line."""
    with pytest.raises(UserError) as caught:
        action()
    message = str(caught.value)
    assert message and "\n" not in message and len(message) < 400, message
    return message


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", CONFIGS)
def test_negative_control_every_kind_loads_as_written(kind: str, shards: int, tmp_path: Path) -> None:
    load(write_checkpoint(tmp_path, kind, shards=shards))


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_unknown_key_is_named_with_its_value(kind: str) -> None:
    message = refusal(lambda: read_config({**CONFIGS[kind], "attention_sink_size": 4}))
    assert "attention_sink_size=4" in message


BAD_SETTINGS = [
    ("ling-flash", "architectures", ["BailingMoeV2_5ForCausalLM"]),
    ("ling-flash", "short_conv_kernel_size", None),
    ("ling-flash", "kda_safe_gate", False),
    ("ling-flash", "kda_lower_bound", -6.0),
    ("ling-flash", "kda_lower_bound", "low"),
    ("ling-flash", "use_mla_nope", True),
    ("ling-flash", "rope_interleave", False),
    ("ling-flash", "scoring_func", "softmax"),
    ("ling-flash", "num_key_value_heads", 2),
    ("ling-flash", "num_experts", 15),
    ("ling-flash", "topk_group", 5),
    ("ling-flash", "num_experts_per_tok", 9),
    ("ling-flash", "expert_swiglu_limit_list", [0, 0, 4]),
    ("ling-flash", "quantization_config", {"quant_method": "fp8"}),
    ("ling-yarn", "rope_scaling", {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}),
    ("llama", "architectures", ["MistralForCausalLM"]),
    ("llama", "architectures", None),
    ("llama", "hidden_act", "gelu"),
    ("llama", "hidden_size", 0),
    ("llama", "hidden_size", "64"),
    ("llama", "num_hidden_layers", True),
    ("llama", "num_key_value_heads", 3),
    ("llama", "attention_bias", "no"),
    ("llama", "rms_norm_eps", None),
    ("llama", "rope_scaling", {"rope_type": "longrope", "factor": 2.0}),
    ("llama", "rope_scaling", {"rope_type": "linear"}),
    ("llama", "rope_scaling", {"factor": 2.0}),
    ("llama", "rope_scaling", "linear"),
    ("llama", "rope_parameters", {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
    ("llama", "head_dim", 15),
    ("llama", "num_hidden_layers", 10**9),
    ("llama", "rope_scaling", {"rope_type": "linear", "factor": 2.0, "twist": 1}),
    ("llama", "rope_scaling", {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}),
    ("smollm", "num_attention_heads", 7),
    ("qwen3", "use_sliding_window", True),
    ("qwen3", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
    ("qwen3-moe", "num_experts_per_tok", 9),
    ("qwen3-moe", "norm_topk_prob", 1),
]


SPOKEN_OF = {"rope_scaling": "rope", "rope_parameters": "partial_rotary_factor", "head_dim": "rotary width"}
"""Part of the message where that is not the key itself."""


@pytest.mark.parametrize(("kind", "name", "value"), BAD_SETTINGS)
def test_a_setting_we_cannot_run_is_named(kind: str, name: str, value: Any) -> None:
    message = refusal(lambda: read_config({**CONFIGS[kind], name: value}))
    assert SPOKEN_OF.get(name, name) in message, message


WRONG = (None, -1, 0, 1.5, "x", "", [], {}, [1], ["x"], {"x": 1}, math.nan, math.inf, 10**30)


@pytest.mark.parametrize("kind", CONFIGS)
def test_no_setting_however_wrong_leads_to_anything_but_a_user_error(kind: str) -> None:
    rope = CONFIGS[kind]["rope_scaling"] or {}
    wrong = [{name: value} for name in CONFIGS[kind] for value in WRONG]
    wrong += [{"rope_scaling": {**rope, name: value}} for name in rope for value in WRONG]
    refused = 0
    for change in wrong:
        try:
            read_config({**CONFIGS[kind], **change})
        except UserError as error:
            refused += 1
            assert "\n" not in str(error), change
    assert refused > len(wrong) // 4  # the rest are fields without effect, or values that happen to be allowed


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_missing_setting_is_named(kind: str) -> None:
    for name in ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"):
        config = {key: value for key, value in CONFIGS[kind].items() if key != name}
        assert name in refusal(lambda config=config: read_config(config))


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_missing_tensors_are_named(kind: str, tmp_path: Path) -> None:
    tensors = random_tensors(CONFIGS[kind])
    del tensors[NORM]
    save_checkpoint(tmp_path, CONFIGS[kind], tensors)
    assert f"lacks {NORM}" in refusal(lambda: load(tmp_path))


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_unexpected_tensors_are_named(kind: str, tmp_path: Path) -> None:
    tensors = {**random_tensors(CONFIGS[kind]), "model.layers.1.adapter.weight": np.ones(3, np.float32)}
    save_checkpoint(tmp_path, CONFIGS[kind], tensors)
    assert "model.layers.1.adapter.weight" in refusal(lambda: load(tmp_path))


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_a_wrong_shape_is_named_with_both_shapes(kind: str, tmp_path: Path) -> None:
    tensors = random_tensors(CONFIGS[kind])
    width = CONFIGS[kind]["hidden_size"]
    tensors[NORM] = np.ones(width + 1, np.float32)
    save_checkpoint(tmp_path, CONFIGS[kind], tensors)
    message = refusal(lambda: load(tmp_path))
    assert NORM in message and f"[{width + 1}]" in message and f"[{width}]" in message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_a_weight_that_is_not_finite_is_named(kind: str, value: float, tmp_path: Path) -> None:
    tensors = random_tensors(CONFIGS[kind])
    tensors[NORM][5] = value
    save_checkpoint(tmp_path, CONFIGS[kind], tensors)
    assert NORM in refusal(lambda: load(tmp_path))


def test_a_tied_head_that_differs_from_the_embedding_is_refused(tmp_path: Path) -> None:
    config = CONFIGS["smollm"]
    tensors = random_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_checkpoint(tmp_path, config, tensors)
    load(tmp_path)  # stored twice and equal: no fault
    tensors["lm_head.weight"][0, 0] += 1
    save_checkpoint(tmp_path, config, tensors)
    assert "lm_head.weight" in refusal(lambda: load(tmp_path))


def test_missing_shards_are_all_listed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", shards=4)
    gone = [f"model-0000{i}-of-00004.safetensors" for i in (2, 4)]
    for name in gone:
        (tmp_path / name).unlink()
    message = refusal(lambda: load(tmp_path))
    assert all(name in message for name in gone)


def test_a_truncated_shard_is_found_before_loading(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", shards=2)
    file = tmp_path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert file.name in refusal(lambda: open_checkpoint(tmp_path))


def test_settings_that_are_not_json_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    for content in ("{", "[]", json.dumps("llama")):
        (tmp_path / "config.json").write_text(content)
        assert "config.json" in refusal(lambda: load(tmp_path))
