"""Llama and SmolLM2: grouped-query attention with half-split rope, gated MLP."""

from __future__ import annotations

from typing import Any

from soloist.config import BlockConfig, GqaConfig, MlpConfig, ModelConfig
from soloist.models.keys import ConfigKeys, divides, reach, read_rope
from soloist.models.rules import Rules

ARCHITECTURES = ("LlamaForCausalLM",)

IGNORED_TENSORS = (r"\.rotary_emb\.inv_freq$",)

RULES: Rules = {
    "model": {"model.embed_tokens.weight": "embed:weight", "model.norm.weight": "norm:weight"},
    "head": {"lm_head.weight": "head:weight"},
    "block": {
        "model.layers.{l}.input_layernorm.weight": "input_norm:weight",
        "model.layers.{l}.post_attention_layernorm.weight": "post_norm:weight",
    },
    "gqa": {
        "model.layers.{l}.self_attn.q_proj.weight": "mixer.qkv:q",
        "model.layers.{l}.self_attn.k_proj.weight": "mixer.qkv:k",
        "model.layers.{l}.self_attn.v_proj.weight": "mixer.qkv:v",
        "model.layers.{l}.self_attn.o_proj.weight": "mixer.out:weight",
    },
    "gqa.qkv_bias": {
        "model.layers.{l}.self_attn.q_proj.bias": "mixer.qkv:q.bias",
        "model.layers.{l}.self_attn.k_proj.bias": "mixer.qkv:k.bias",
        "model.layers.{l}.self_attn.v_proj.bias": "mixer.qkv:v.bias",
    },
    "gqa.out_bias": {"model.layers.{l}.self_attn.o_proj.bias": "mixer.out:weight.bias"},
    "mlp": {
        "model.layers.{l}.mlp.gate_proj.weight": "mlp.gate_up:gate",
        "model.layers.{l}.mlp.up_proj.weight": "mlp.gate_up:up",
        "model.layers.{l}.mlp.down_proj.weight": "mlp.down:weight",
    },
    "mlp.bias": {
        "model.layers.{l}.mlp.gate_proj.bias": "mlp.gate_up:gate.bias",
        "model.layers.{l}.mlp.up_proj.bias": "mlp.gate_up:up.bias",
        "model.layers.{l}.mlp.down_proj.bias": "mlp.down:weight.bias",
    },
}


def config(hf: dict[str, Any]) -> ModelConfig:
    keys = ConfigKeys(hf)
    keys.only("hidden_act", "silu")
    keys.ignore("rope_interleaved", "is_llama_config", "intermediate_dim", "max_window_layers", "sliding_window")
    positions = keys.whole("max_position_embeddings")
    bias = keys.flag("attention_bias", False)
    mixer = read_gqa(keys, positions, qk_norm=False, qkv_bias=bias, out_bias=bias)
    mlp = MlpConfig(keys.whole("intermediate_size"), bias=keys.flag("mlp_bias", False))
    blocks = (BlockConfig(mixer, mlp),) * keys.layers()
    return finish_dense(keys, "llama", hf, blocks, reach(mixer.rope, positions))


def read_gqa(keys: ConfigKeys, positions: int, *, qk_norm: bool, qkv_bias: bool, out_bias: bool) -> GqaConfig:
    """Attention fields that Llama and Qwen3 share."""
    heads = keys.whole("num_attention_heads")
    kv_heads = keys.whole("num_key_value_heads", heads)
    divides(kv_heads, heads, "num_attention_heads and num_key_value_heads")
    hidden = keys.whole("hidden_size")
    if keys.take("head_dim", None) is None:
        divides(heads, hidden, "hidden_size and num_attention_heads")
    head_dim = keys.whole("head_dim", hidden // heads)
    rope = read_rope(keys, head_dim, positions)
    return GqaConfig(heads, kv_heads, head_dim, rope, head_dim**-0.5, qk_norm, qkv_bias, out_bias)


def finish_dense(
    keys: ConfigKeys, family: str, hf: dict[str, Any], blocks: tuple[BlockConfig, ...], positions: int
) -> ModelConfig:
    """The rest that Llama and Qwen3 share."""
    model = ModelConfig(
        family=family,
        architecture=hf["architectures"][0],
        vocab_size=keys.whole("vocab_size"),
        hidden_size=keys.whole("hidden_size"),
        norm_eps=keys.number("rms_norm_eps", 1e-6, low=0),
        blocks=blocks,
        max_positions=positions,
        tied_head=keys.flag("tie_word_embeddings", False),
        dtype=keys.dtype(),
    )
    keys.finish()
    return model
