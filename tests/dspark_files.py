"""Random drafters in every format in the wild, written as those projects write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.naive_dspark import Facts, Tensors

D, V, WIDTH = 64, 101, 96

FORMATS = ("deepspec", "speculators", "specforge", "dflash", "speculators-dflash")


def tensors_of(f: Facts, seed: int = 0) -> Tensors:
    """The tensors of a drafter, under DeepSpec's names, large enough to disagree about every token."""
    q, kv, r = f.heads * f.head_dim, f.kv_heads * f.head_dim, f.rank
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (D, len(f.taps) * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    for i in range(f.layers):
        p, a = f"layers.{i}.", f"layers.{i}.self_attn."
        shapes |= {p + "input_layernorm.weight": (D,), p + "post_attention_layernorm.weight": (D,)}
        shapes |= {a + "q_proj.weight": (q, D), a + "k_proj.weight": (kv, D), a + "v_proj.weight": (kv, D)}
        shapes |= {a + "o_proj.weight": (D, q), a + "q_norm.weight": (f.head_dim,), a + "k_norm.weight": (f.head_dim,)}
        shapes |= {p + "mlp.gate_proj.weight": (WIDTH, D), p + "mlp.up_proj.weight": (WIDTH, D)}
        shapes |= {p + "mlp.down_proj.weight": (D, WIDTH)}
    rows = V if f.draft_ids is None else len(f.draft_ids)
    if f.markov:
        shapes |= {"markov_head.markov_w1.weight": (V, r), "markov_head.markov_w2.weight": (rows, r)}
    if f.markov == "gated":
        shapes |= {"markov_head.gate_proj.weight": (r, D + r), "markov_head.gate_proj.bias": (r,)}
    if f.markov == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (3 * r, 2 * r + D), "markov_head.joint_proj.bias": (3 * r,)}
    if f.confidence:
        shapes["confidence_head.proj.weight"] = (1, D + (r if f.confidence == "markov" else 0))
        shapes["confidence_head.proj.bias"] = (1,)
    if f.draft_ids is not None:
        shapes["lm_head.weight"] = (rows, D)
    g = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=g)
        if "norm" in name:
            values = 1 + 0.3 * values
        elif len(shape) > 1:
            values = values * (shape[-1] ** -0.5 if "markov_w1" not in name else 1.0)
        found[name] = values
    return found


def config_of(f: Facts, form: str, num_layers: int) -> dict[str, Any]:
    """config.json of a drafter for a model of num_layers."""
    backbone = {
        "model_type": "qwen3", "hidden_size": D, "vocab_size": V, "num_hidden_layers": f.layers,
        "num_attention_heads": f.heads, "num_key_value_heads": f.kv_heads, "head_dim": f.head_dim,
        "intermediate_size": WIDTH, "hidden_act": "silu", "rms_norm_eps": f.eps, "rope_theta": f.theta,
        "rope_scaling": None, "max_position_embeddings": 512, "attention_bias": False,
        "layer_types": ["sliding_attention" if f.reach else "full_attention"] * f.layers,
        "sliding_window": f.reach or None,
    }  # fmt: skip
    heads: dict[str, Any] = {"markov_rank": f.rank if f.markov else 0, "enable_confidence_head": f.confidence is not None}
    if f.markov:
        heads["markov_head_type"] = f.markov
    if f.confidence:
        heads["confidence_head_with_markov"] = f.confidence == "markov"
    taps = {"target_layer_ids": list(f.taps), "mask_token_id": f.mask}
    if form == "deepspec":
        return {**backbone, **heads, **taps, "architectures": ["Qwen3DSparkModel"], "block_size": f.block,
                "num_target_layers": num_layers, "num_anchors": 512, "tie_word_embeddings": False}  # fmt: skip
    if form == "specforge":
        nested = {**heads, **taps, "projector_type": "dspark", "attention_mode": "gqa", "block_size": f.block}
        return {**backbone, "architectures": ["LingDSparkModel"], "num_target_layers": num_layers,
                "dflash_config": nested}  # fmt: skip
    if form == "dflash":
        return {**backbone, "architectures": ["DFlashDraftModel"], "block_size": f.block,
                "num_target_layers": num_layers, "dflash_config": taps}  # fmt: skip
    kind = "dflash" if form == "speculators-dflash" else "dspark"
    said = {"sample_from_anchor": f.anchor_first} if kind == "dspark" else {}
    return {
        "architectures": ["DSparkDraftModel"], "speculators_model_type": kind, "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": kind, "proposal_methods": [{"speculative_tokens": f.drafts}]},
        "transformer_layer_config": backbone, "block_size": f.block, "mask_token_id": f.mask,
        "draft_vocab_size": V if f.draft_ids is None else len(f.draft_ids),
        "aux_hidden_state_layer_ids": [tap + 1 for tap in f.taps], **said, **(heads if kind == "dspark" else {}),
    }  # fmt: skip


def write_drafter(folder: Path, f: Facts, form: str, num_layers: int, seed: int = 0, **changes: Any) -> Tensors:
    """Write a drafter; `changes` to top-level fields, None removes one.   Returns: its tensors."""
    tensors = tensors_of(f, seed)
    stored = dict(tensors)
    if form == "deepspec" and f.draft_ids is None:  # its files repeat what is the model's
        stored |= {"embed_tokens.weight": torch.zeros(V, D), "lm_head.weight": torch.zeros(V, D)}
    if f.draft_ids is not None:
        ids = torch.tensor(f.draft_ids)
        stored["d2t"] = ids - torch.arange(len(ids))
        stored["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    config = {**config_of(f, form, num_layers), **changes}
    save(folder, {key: value for key, value in config.items() if changes.get(key, 0) is not None}, stored)
    return tensors


def save(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
