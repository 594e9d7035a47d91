"""config.json of tiny models of every family: the public files' fields, and no others, with small numbers in them."""

from __future__ import annotations

from typing import Any

_TOKENS: dict[str, Any] = {"vocab_size": 101, "bos_token_id": 98, "eos_token_id": 100}

LING_FLASH: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid", **_TOKENS, "pad_token_id": 99,
    "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_kv_heads_for_linear_attn": 0, "head_dim": 32, "layer_group_size": 3, "first_k_dense_replace": 2,
    "intermediate_size": 96, "num_experts": 16, "num_experts_per_tok": 4, "num_shared_experts": 1,
    "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24, "n_group": 4, "topk_group": 2,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "score_function": "sigmoid", "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "moe_router_enable_expert_bias": True, "router_dtype": "fp32", "q_lora_rank": None,
    "kv_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "qk_head_dim": 48, "v_head_dim": 32,
    "rotary_dim": 16, "partial_rotary_factor": 0.5, "rope_interleave": True, "rope_theta": 6000000,
    "rope_scaling": None, "max_position_embeddings": 512, "gated_attention_proj_granularity_type": "head_wise",
    "short_conv_kernel_size": 4, "no_kda_lora": True, "use_kda_lora": False, "kda_safe_gate": True,
    "kda_lower_bound": -5.0, "use_mla_nope": False, "mtp_use_kda": False, "num_nextn_predict_layers": 0,
    "expert_swiglu_limit_list": [0] * 6, "share_expert_swiglu_limit_list": [0] * 6, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "use_bias": False, "use_qkv_bias": False, "tie_word_embeddings": False,
    "linear_silu": True, "group_norm_size": 1, "use_qk_norm": True, "max_window_layers": 20, "seq_aux": True,
    "scale_router_input": False, "up_proj_norm": False, "value_norm": False, "use_nGPT": False,
    "mtp_loss_scaling_factor": 0, "attention_dropout": 0.0, "embedding_dropout": 0.0, "output_dropout": 0.0,
    "initializer_range": 0.02, "use_cache": True,
}  # fmt: skip
LING_TINY = {
    **LING_FLASH, "num_hidden_layers": 8, "layer_group_size": 4, "first_k_dense_replace": 1, "q_lora_rank": 20,
    "v_head_dim": 24, "expert_swiglu_limit_list": None, "share_expert_swiglu_limit_list": None,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", **_TOKENS, "hidden_size": 64,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "rope_scaling": None, "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "initializer_range": 0.02, "pretraining_tp": 1, "tie_word_embeddings": False, "use_cache": True,
}  # fmt: skip
SMOLLM = {
    **{name: value for name, value in LLAMA.items() if name != "head_dim"}, "hidden_size": 72,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True, "rope_theta": 100000,
    "is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"kv_cache_dtype": {"q4": "float16"}},
}  # fmt: skip
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **_TOKENS, "hidden_size": 64,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32,
    "intermediate_size": 96, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "rope_scaling": None, "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "initializer_range": 0.02, "max_window_layers": 3, "sliding_window": None, "use_sliding_window": False,
    "tie_word_embeddings": False, "use_cache": True,
}  # fmt: skip
QWEN3_MOE = {
    **QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [1], "output_router_logits": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 4.0,
         "beta_slow": 1.0}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "ling-flash": LING_FLASH,
    "ling-tiny": LING_TINY,
    "ling-yarn": {**LING_TINY, "num_hidden_layers": 4, "rope_scaling": _YARN},
    "ling-mtp": {**LING_FLASH, "num_nextn_predict_layers": 1},
    "ling-clamped": {
        **LING_FLASH,
        "expert_swiglu_limit_list": [0, 0, 0, 0.4, 0.4, 0.3],
        "share_expert_swiglu_limit_list": [0, 0, 0.5, 0.5, 0.4, 0.4],
    },
    "ling-tail": {
        **LING_FLASH, "num_hidden_layers": 5, "moe_shared_expert_intermediate_size": 40,
        "expert_swiglu_limit_list": None, "share_expert_swiglu_limit_list": None,
    },
    "llama": LLAMA,
    "smollm": SMOLLM,
    "llama-biased": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama-llama3": {**LLAMA, "rope_scaling": _LLAMA3},
    "llama-linear": {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama-dynamic": {**LLAMA, "max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "llama-yarn": {**LLAMA, "rope_scaling": _YARN},
    "qwen3": QWEN3,
    "qwen3-tied": {**QWEN3, "tie_word_embeddings": True},
    "qwen3-moe": QWEN3_MOE,
}  # fmt: skip
"""By kind. `ling-tail` ends with layers beyond the last full group; `ling-clamped` has SwiGLU limits that bite."""
