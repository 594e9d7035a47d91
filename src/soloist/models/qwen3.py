"""Qwen3, dense and mixture of experts: Llama with norms on every query and key head."""

from __future__ import annotations

from typing import Any

from soloist.config import BlockConfig, MlpConfig, ModelConfig, MoeConfig
from soloist.errors import UserError
from soloist.models import llama
from soloist.models.keys import ConfigKeys, reach
from soloist.models.rules import Rules

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")

IGNORED_TENSORS = llama.IGNORED_TENSORS

RULES: Rules = {
    **llama.RULES,
    "gqa.qk_norm": {
        "model.layers.{l}.self_attn.q_norm.weight": "mixer.q_norm:weight",
        "model.layers.{l}.self_attn.k_norm.weight": "mixer.k_norm:weight",
    },
    "moe": {
        "model.layers.{l}.mlp.gate.weight": "mlp.router:weight",
        "model.layers.{l}.mlp.experts.{e}.gate_proj.weight": "mlp.experts:gate.{e}",
        "model.layers.{l}.mlp.experts.{e}.up_proj.weight": "mlp.experts:up.{e}",
        "model.layers.{l}.mlp.experts.{e}.down_proj.weight": "mlp.experts:down.{e}",
    },
}


def config(hf: dict[str, Any]) -> ModelConfig:
    keys = ConfigKeys(hf)
    keys.only("hidden_act", "silu")
    keys.only("use_sliding_window", False)
    keys.ignore("sliding_window", "max_window_layers", "output_router_logits", "router_aux_loss_coef")
    layers = keys.layers()
    if any(kind != "full_attention" for kind in keys.listed("layer_types") or ()):
        raise UserError("config.json has layer_types other than 'full_attention'; sliding windows are not supported")
    positions = keys.whole("max_position_embeddings")
    bias = keys.flag("attention_bias", False)
    mixer = llama.read_gqa(keys, positions, qk_norm=True, qkv_bias=bias, out_bias=bias)
    dense = MlpConfig(keys.whole("intermediate_size"))
    routed = _moe(keys) if hf["architectures"][0] == "Qwen3MoeForCausalLM" else None
    blocks = []
    step = keys.whole("decoder_sparse_step", 1) if routed else 0
    dense_layers = keys.listed("mlp_only_layers") or [] if routed else []
    for i in range(layers):
        sparse = routed is not None and i not in dense_layers and (i + 1) % step == 0
        blocks.append(BlockConfig(mixer, routed if sparse and routed else dense))
    return llama.finish_dense(keys, "qwen3", hf, tuple(blocks), reach(mixer.rope, positions))


def _moe(keys: ConfigKeys) -> MoeConfig:
    alias = keys.take("num_local_experts", None)
    config = MoeConfig(
        num_experts=keys.whole("num_experts", alias) if alias else keys.whole("num_experts"),
        top_k=keys.whole("num_experts_per_tok"),
        width=keys.whole("moe_intermediate_size"),
        score="softmax",
        normalise=keys.flag("norm_topk_prob", False),
    )
    if config.top_k > config.num_experts:
        raise UserError(f"config.json: num_experts_per_tok={config.top_k} is above num_experts={config.num_experts}")
    return config
