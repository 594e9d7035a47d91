"""Tiny random checkpoints of every family, in Hugging Face layout with the public field and tensor names.

The weights are a function of (seed, tensor name) in exact integer arithmetic, so they are the same on every machine and
never need storing. The names and shapes are listed here a second time, from the public files and not from the families'
own rules, so that a checkpoint also tests those rules.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from soloist.testing.configs import CONFIGS

Shapes = Iterator[tuple[str, tuple[int, ...]]]

_FP32_SUFFIXES = ("A_log", "dt_bias", "expert_bias")
"""Stored in fp32 whatever the dtype of the rest, as in the public Ling-3.0 files."""


def write_checkpoint(
    folder: str | Path,
    kind: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    tokenizer: bool = False,
    **overrides: Any,
) -> Path:
    """Write config.json, generation_config.json, safetensors and, if asked for, a tokenizer with a chat template.

    Args: kind: a key of CONFIGS; dtype: float32, bfloat16 or float16; shards: number of weight files;
        overrides: fields of config.json to set, which the shapes follow. With a tokenizer the vocabulary is its own.
    Returns: the folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer:
        from soloist.testing.tokenizer import write_tokenizer

        overrides = {**write_tokenizer(folder), **overrides}
    config = {**CONFIGS[kind], "torch_dtype": dtype, **overrides}
    save_checkpoint(folder, config, random_tensors(config, seed), dtype, shards)
    return folder


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint with this config.json, by public name, fp32."""
    return {name: _draw(name, shape, seed) for name, shape in tensor_shapes(config)}


def save_checkpoint(
    folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], dtype: str = "float32", shards: int = 1
) -> None:
    """Write config.json, generation_config.json and the weights, as one file or as shards with an index."""
    import torch
    from safetensors.torch import save_file

    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {k: config[k] for k in _TOKEN_IDS if k in config})
    stored = {}
    for name, values in tensors.items():
        kept = torch.float32 if name.endswith(_FP32_SUFFIXES) else getattr(torch, dtype)
        stored[name] = torch.from_numpy(values).to(kept).contiguous()
    if shards == 1:
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        return
    names, weight_map = list(stored), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[len(names) * i // shards : len(names) * (i + 1) // shards]
        save_file({name: stored[name] for name in part}, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def _draw(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Values of one tensor: unit gain for matrices, norms around 1, gates and biases where the laws bend most."""
    values = bell(f"{seed}/{name}", math.prod(shape)).reshape(shape)
    if "norm" in name:
        values = 1 + 0.3 * values
    elif name.endswith("A_log"):
        values = 0.7 + 0.4 * values
    elif name.endswith("dt_bias"):
        values = values - 1.5
    elif name.endswith("expert_bias"):
        values = 0.3 * values - 0.9  # all choices negative: a router that masks with 0 would fail
    elif name.endswith(".bias"):
        values = 0.1 * values
    elif "conv1d" in name:
        values = 0.5 * values
    else:
        values = values * shape[-1] ** -0.5
    return values.astype(np.float32)


def bell(key: str, count: int) -> np.ndarray:
    """Bell-shaped numbers of mean 0, variance 1: sums of four 16-bit uniforms from a Philox stream keyed by a string.

    Returns: [count] fp64.   The raw stream is fixed by its definition, unlike a library's normal deviates.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    raw = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)
    sums = raw.astype("<u8").view("<u2").reshape(count, 4).sum(1, dtype=np.int64)
    return (sums - 2 * 65535) * (math.sqrt(3) / 65536)


def tensor_shapes(config: dict[str, Any]) -> Shapes:
    """Public name and shape of every tensor of a checkpoint with this config.json."""
    if config["architectures"][0] == "BailingMoeV3ForCausalLM":
        return _ling(config)
    return _llama_like(config)


def _ling(c: dict[str, Any]) -> Shapes:
    D, V, L, group = c["hidden_size"], c["vocab_size"], c["num_hidden_layers"], c["layer_group_size"]
    yield "model.word_embeddings.weight", (V, D)
    for layer in range(L):
        p = f"model.layers.{layer}."
        is_mla = (layer + 1) % group == 0 or layer >= group * (L // group)
        yield from (_mla if is_mla else _kda)(c, p + "attention.")
        yield from _gated(p + "mlp.", D, c["intermediate_size"]) if layer < c["first_k_dense_replace"] else _moe(c, p)
        yield from _block_norms(p, D)
    for layer in range(L, L + c["num_nextn_predict_layers"]):
        p = f"model.layers.{layer}."
        yield p + "enorm.weight", (D,)
        yield p + "hnorm.weight", (D,)
        yield p + "eh_proj.weight", (D, 2 * D)
        yield from _mla(c, p + "attention.")
        yield from _moe(c, p)
        yield from _block_norms(p, D)
        yield p + "final_layernorm.weight", (D,)
    yield "model.norm.weight", (D,)
    yield "lm_head.weight", (V, D)


def _kda(c: dict[str, Any], p: str) -> Shapes:
    D, H, K = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
    for name in "qkvfg":
        yield f"{p}{name}_proj.weight", (H * K, D)
    for name in "qkv":
        yield f"{p}{name}_conv1d.weight", (H * K, 1, c["short_conv_kernel_size"])
    yield p + "b_proj.weight", (H, D)
    yield p + "A_log", (H,)
    yield p + "dt_bias", (H * K,)
    yield p + "o_norm.weight", (K,)
    yield p + "o_proj.weight", (D, H * K)


def _mla(c: dict[str, Any], p: str) -> Shapes:
    D, H, R, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"], c["q_lora_rank"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    if rank:
        yield p + "q_a_proj.weight", (rank, D)
        yield p + "q_a_layernorm.weight", (rank,)
        yield p + "q_b_proj.weight", (H * (nope + rope), rank)
    else:
        yield p + "q_proj.weight", (H * (nope + rope), D)
    yield p + "kv_a_proj_with_mqa.weight", (R + rope, D)
    yield p + "kv_a_layernorm.weight", (R,)
    yield p + "kv_b_proj.weight", (H * (nope + v), R)
    yield p + "g_proj.weight", (H, D)
    yield p + "dense.weight", (D, H * v)


def _moe(c: dict[str, Any], p: str) -> Shapes:
    D, E = c["hidden_size"], c["num_experts"]
    yield p + "mlp.gate.weight", (E, D)
    yield p + "mlp.gate.expert_bias", (E,)
    for e in range(E):
        yield from _gated(f"{p}mlp.experts.{e}.", D, c["moe_intermediate_size"])
    yield from _gated(p + "mlp.shared_experts.", D, c["moe_shared_expert_intermediate_size"])


def _llama_like(c: dict[str, Any]) -> Shapes:
    D, V, heads = c["hidden_size"], c["vocab_size"], c["num_attention_heads"]
    width = c.get("head_dim") or D // heads
    sizes = {"q": heads * width, "k": c["num_key_value_heads"] * width, "v": c["num_key_value_heads"] * width}
    yield "model.embed_tokens.weight", (V, D)
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        for name, size in sizes.items():
            yield f"{p}self_attn.{name}_proj.weight", (size, D)
            if c["attention_bias"]:
                yield f"{p}self_attn.{name}_proj.bias", (size,)
        yield p + "self_attn.o_proj.weight", (D, heads * width)
        if c["attention_bias"]:
            yield p + "self_attn.o_proj.bias", (D,)
        if c["architectures"][0].startswith("Qwen3"):
            yield p + "self_attn.q_norm.weight", (width,)
            yield p + "self_attn.k_norm.weight", (width,)
        if "num_experts" in c and layer not in c["mlp_only_layers"]:
            yield p + "mlp.gate.weight", (c["num_experts"], D)
            for e in range(c["num_experts"]):
                yield from _gated(f"{p}mlp.experts.{e}.", D, c["moe_intermediate_size"])
        else:
            yield from _gated(p + "mlp.", D, c["intermediate_size"], c.get("mlp_bias", False))
        yield from _block_norms(p, D)
    yield "model.norm.weight", (D,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (V, D)


def _gated(p: str, hidden: int, width: int, bias: bool = False) -> Shapes:
    for name, out, inner in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
        yield f"{p}{name}_proj.weight", (out, inner)
        if bias:
            yield f"{p}{name}_proj.bias", (out,)


def _block_norms(p: str, hidden: int) -> Shapes:
    yield p + "input_layernorm.weight", (hidden,)
    yield p + "post_attention_layernorm.weight", (hidden,)
