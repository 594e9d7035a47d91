"""Ling-3.0 (BailingMoeV3ForCausalLM): KDA and gated MLA layers, group-routed experts, an MTP layer.

Source: the public checkpoints' field and tensor names; transformers' bailing_hybrid; SGLang's bailing_moe_v3 (clamps).
"""

from __future__ import annotations

from typing import Any

from soloist.config import BlockConfig, KdaConfig, MlaConfig, MlpConfig, ModelConfig, MoeConfig
from soloist.errors import UserError
from soloist.models.keys import ConfigKeys, divides, layer_list, reach, read_rope
from soloist.models.rules import Rules

ARCHITECTURES = ("BailingMoeV3ForCausalLM",)

IGNORED_TENSORS = (r"\.rotary_emb\.inv_freq$",)

_P = "model.layers.{l}."
RULES: Rules = {
    "model": {"model.word_embeddings.weight": "embed:weight", "model.norm.weight": "norm:weight"},
    "head": {"lm_head.weight": "head:weight"},
    "block": {
        _P + "input_layernorm.weight": "input_norm:weight",
        _P + "post_attention_layernorm.weight": "post_norm:weight",
    },
    "kda": {
        _P + "attention.q_proj.weight": "mixer.in_proj:q",
        _P + "attention.k_proj.weight": "mixer.in_proj:k",
        _P + "attention.v_proj.weight": "mixer.in_proj:v",
        _P + "attention.f_proj.weight": "mixer.in_proj:f",
        _P + "attention.g_proj.weight": "mixer.in_proj:z",
        _P + "attention.b_proj.weight": "mixer.in_proj:b",
        _P + "attention.q_conv1d.weight": "mixer.conv:q",
        _P + "attention.k_conv1d.weight": "mixer.conv:k",
        _P + "attention.v_conv1d.weight": "mixer.conv:v",
        _P + "attention.A_log": "mixer.a_log:weight",
        _P + "attention.dt_bias": "mixer.dt_bias:weight",
        _P + "attention.o_norm.weight": "mixer.out_norm:weight",
        _P + "attention.o_proj.weight": "mixer.out:weight",
    },
    "mla": {
        _P + "attention.kv_a_proj_with_mqa.weight": "mixer.in_proj:kv",
        _P + "attention.kv_a_layernorm.weight": "mixer.kv_norm:weight",
        _P + "attention.kv_b_proj.weight": "mixer.kv_up:weight",
        _P + "attention.g_proj.weight": "mixer.in_proj:gate",
        _P + "attention.dense.weight": "mixer.out:weight",
    },
    "mla.q": {_P + "attention.q_proj.weight": "mixer.in_proj:q"},
    "mla.q_lora": {
        _P + "attention.q_a_proj.weight": "mixer.in_proj:q",
        _P + "attention.q_a_layernorm.weight": "mixer.q_norm:weight",
        _P + "attention.q_b_proj.weight": "mixer.q_up:weight",
    },
    "mlp": {
        _P + "mlp.gate_proj.weight": "mlp.gate_up:gate",
        _P + "mlp.up_proj.weight": "mlp.gate_up:up",
        _P + "mlp.down_proj.weight": "mlp.down:weight",
    },
    "moe": {
        _P + "mlp.gate.weight": "mlp.router:weight",
        _P + "mlp.experts.{e}.gate_proj.weight": "mlp.experts:gate.{e}",
        _P + "mlp.experts.{e}.up_proj.weight": "mlp.experts:up.{e}",
        _P + "mlp.experts.{e}.down_proj.weight": "mlp.experts:down.{e}",
    },
    "moe.bias": {_P + "mlp.gate.expert_bias": "mlp.selection_bias:weight"},
    "moe.shared": {
        _P + "mlp.shared_experts.gate_proj.weight": "mlp.shared.gate_up:gate",
        _P + "mlp.shared_experts.up_proj.weight": "mlp.shared.gate_up:up",
        _P + "mlp.shared_experts.down_proj.weight": "mlp.shared.down:weight",
    },
    "mtp": {
        _P + "enorm.weight": "embed_norm:weight",
        _P + "hnorm.weight": "hidden_norm:weight",
        _P + "eh_proj.weight": "in_proj:weight",
        _P + "final_layernorm.weight": "final_norm:weight",
    },
}

_DEAD = (
    "attention_bias", "embedding_dropout", "first_linear_layer_replace", "group_norm_size", "kv_channels",
    "linear_silu", "max_window_layers", "moe_router_topk_scaling_factor", "mtp_loss_scaling_factor",
    "output_router_logits", "partial_rotary_factor", "qk_head_dim", "rotary_dim", "router_dtype",
    "router_aux_loss_coef", "scale_router_input", "seq_aux", "sliding_window", "use_qk_norm", "use_sliding_window",
    "v_dim", "aux_loss_alpha", "ep_size", "num_local_experts", "router_z_loss_coef", "rope_interleave_style",
)  # fmt: skip
"""Fields of the public files that change nothing in inference. `use_qk_norm` adds no norm to MLA's q and k;
`partial_rotary_factor` must not shorten the rotary width."""


def config(hf: dict[str, Any]) -> ModelConfig:
    keys = ConfigKeys(hf)
    keys.ignore(*_DEAD)
    _refuse_other_laws(keys)
    layers, first_dense = keys.layers(), keys.whole("first_k_dense_replace", 0, low=0)
    positions = keys.whole("max_position_embeddings")
    kda, mla = _kda(keys), _mla(keys, positions)
    dense = MlpConfig(keys.whole("intermediate_size"))
    routed_limits = layer_list(keys, "expert_swiglu_limit_list", layers)
    shared_limits = layer_list(keys, "share_expert_swiglu_limit_list", layers)
    group = keys.whole("layer_group_size")
    blocks = []
    for i in range(layers):
        is_mla = (i + 1) % group == 0 or i >= group * (layers // group)
        mlp = dense if i < first_dense else _moe(keys, routed_limits[i], shared_limits[i])
        blocks.append(BlockConfig(mla if is_mla else kda, mlp))
    mtp = keys.whole("num_nextn_predict_layers", 0, low=0, high=16)
    model = ModelConfig(
        family="ling",
        architecture=hf["architectures"][0],
        vocab_size=keys.whole("vocab_size"),
        hidden_size=keys.whole("hidden_size"),
        norm_eps=keys.number("rms_norm_eps", 1e-6, low=0),
        blocks=tuple(blocks),
        max_positions=reach(mla.rope, positions),
        tied_head=keys.flag("tie_word_embeddings", False),
        dtype=keys.dtype(),
        mtp_blocks=(BlockConfig(mla, _moe(keys, 0.0, 0.0)),) * mtp,
    )
    keys.finish()
    return model


def _refuse_other_laws(keys: ConfigKeys) -> None:
    """Switches of the vendor's code whose other positions no public checkpoint uses."""
    keys.only("hidden_act", "silu")
    keys.only("gated_attention_proj_granularity_type", "head_wise")
    keys.only("no_kda_lora", True)
    keys.only("use_kda_lora", False)
    keys.only("kda_safe_gate", True)
    keys.only("use_mla_nope", False)
    keys.only("mtp_use_kda", False)
    keys.only("rope_interleave", True)
    keys.only("score_function", "sigmoid")
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    for name in ("use_bias", "use_qkv_bias", "use_nGPT", "up_proj_norm", "value_norm"):
        keys.only(name, False)
    if keys.take("short_conv_kernel_size", None) is None:
        raise UserError("config.json has no short_conv_kernel_size: this is Ling-2.x (Lightning attention)")


def _kda(keys: ConfigKeys) -> KdaConfig:
    heads = keys.whole("num_attention_heads")
    keys.only("num_kv_heads_for_linear_attn", 0, heads)
    bound = keys.number("kda_lower_bound", -5.0)
    if not -5.0 <= bound < 0:
        raise UserError(f"config.json has kda_lower_bound={bound}; prefill in fp32 is safe from -5 to 0")
    return KdaConfig(heads, keys.whole("head_dim"), keys.whole("short_conv_kernel_size", low=2), bound)


def _mla(keys: ConfigKeys, positions: int) -> MlaConfig:
    heads = keys.whole("num_attention_heads")
    keys.only("num_key_value_heads", heads)
    nope, rope_dim = keys.whole("qk_nope_head_dim"), keys.whole("qk_rope_head_dim")
    scaling = {**keys.mapping("rope_parameters"), **keys.mapping("rope_scaling")}
    rope = read_rope(keys, rope_dim, positions, interleaved=True)
    scale = (nope + rope_dim) ** -0.5
    if rope.kind == "yarn" and scaling.get("mscale_all_dim"):
        raise UserError("config.json has mscale_all_dim in rope_scaling, which no Ling-3.0 recipe does; remove it")
    rank = keys.take("q_lora_rank", None)
    return MlaConfig(
        num_heads=heads,
        q_lora_rank=None if rank is None else keys.whole("q_lora_rank"),
        kv_lora_rank=keys.whole("kv_lora_rank"),
        nope_dim=nope,
        v_dim=keys.whole("v_head_dim"),
        rope=rope,
        scale=scale,
    )


def _moe(keys: ConfigKeys, routed_limit: float, shared_limit: float) -> MoeConfig:
    experts, groups = keys.whole("num_experts"), keys.whole("n_group", 1)
    top_groups, top_k = keys.whole("topk_group", 1), keys.whole("num_experts_per_tok")
    divides(groups, experts, "num_experts and n_group")
    if top_groups > groups or top_k > top_groups * (experts // groups) or (groups > 1 and experts < 2 * groups):
        raise UserError(
            f"config.json: num_experts_per_tok={top_k} of num_experts={experts} cannot be picked from "
            f"topk_group={top_groups} of n_group={groups}"
        )
    width, shared = keys.whole("moe_intermediate_size"), keys.whole("num_shared_experts", 0, low=0)
    shared_width = keys.whole("moe_shared_expert_intermediate_size", width)
    return MoeConfig(
        num_experts=experts,
        top_k=top_k,
        width=width,
        score="sigmoid",
        normalise=keys.flag("norm_topk_prob", True),
        scaling=keys.number("routed_scaling_factor", 1.0, low=0),
        num_groups=groups,
        top_groups=top_groups,
        selection_bias=keys.flag("moe_router_enable_expert_bias", True),
        limit=routed_limit,
        shared=MlpConfig(shared_width * shared, shared_limit) if shared else None,
    )
