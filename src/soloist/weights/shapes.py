"""Models without weights: the public shapes of a checkpoint, filled with random numbers where they will be used.

For measurements of models whose weights are not at hand, and for nothing else: their text means nothing. Matrices are
drawn with the deviation 1/sqrt(inputs), which keeps activations as large as in a trained model. Ling's selection bias is
drawn too, wide enough that the experts of neighbouring tokens differ, as they do in a trained router.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from soloist.dist.share import Share, whole
from soloist.errors import UserError
from soloist.text.source import TokenizerSource
from soloist.weights.checkpoint import TensorInfo
from soloist.weights.loader import model_shapes, model_slots

PREFIX = "shapes:"
SEED = 20261203
BIAS_DEVIATION = 0.05
"""Of sigmoid scores that vary by about 0.2 from token to token."""

_LING: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid", "torch_dtype": "bfloat16",
    "vocab_size": 157184, "eos_token_id": 156895, "pad_token_id": 156892, "head_dim": 128,
    "num_kv_heads_for_linear_attn": 0, "num_shared_experts": 1, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "score_function": "sigmoid", "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "moe_router_enable_expert_bias": True, "router_dtype": "fp32", "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "qk_head_dim": 192, "v_head_dim": 128, "rotary_dim": 64,
    "partial_rotary_factor": 0.5, "rope_interleave": True, "rope_theta": 6000000, "rope_scaling": None,
    "max_position_embeddings": 262144, "gated_attention_proj_granularity_type": "head_wise", "short_conv_kernel_size": 4,
    "no_kda_lora": True, "use_kda_lora": False, "kda_safe_gate": True, "kda_lower_bound": -5.0, "use_mla_nope": False,
    "mtp_use_kda": False, "num_nextn_predict_layers": 1, "expert_swiglu_limit_list": None,
    "share_expert_swiglu_limit_list": None, "rms_norm_eps": 1e-6, "hidden_act": "silu", "use_bias": False,
    "use_qkv_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
_DENSE: dict[str, Any] = {
    "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "rope_scaling": None,
    "tie_word_embeddings": True,
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "ling-3.0-tiny": {
        **_LING, "hidden_size": 1536, "num_hidden_layers": 24, "layer_group_size": 4, "num_attention_heads": 16,
        "num_key_value_heads": 16, "first_k_dense_replace": 1, "intermediate_size": 4608, "num_experts": 128,
        "moe_intermediate_size": 512, "moe_shared_expert_intermediate_size": 512, "q_lora_rank": 256,
    },
    "ling-3.0-flash": {
        **_LING, "hidden_size": 2560, "num_hidden_layers": 42, "layer_group_size": 6, "num_attention_heads": 32,
        "num_key_value_heads": 32, "first_k_dense_replace": 2, "intermediate_size": 6144, "num_experts": 512,
        "moe_intermediate_size": 768, "moe_shared_expert_intermediate_size": 768, "q_lora_rank": None,
    },
    "qwen3-4b": {
        **_DENSE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "eos_token_id": 151645,
        "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 9728, "max_position_embeddings": 40960, "rope_theta": 1000000, "use_sliding_window": False,
    },
    "smollm2-135m": {
        **_DENSE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "eos_token_id": 2,
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536, "max_position_embeddings": 8192, "rope_theta": 100000, "rms_norm_eps": 1e-5,
        "mlp_bias": False,
    },
}  # fmt: skip


class Shapes:
    """A checkpoint that has a configuration and no tensors. No tokenizer: prompts are token ids."""

    def __init__(self, name: str):
        if name not in CONFIGS:
            raise UserError(f"{PREFIX}{name}: no such shapes; there are {', '.join(PREFIX + known for known in CONFIGS)}")
        self.path = Path(PREFIX + name)
        self.config = dict(CONFIGS[name])
        self.generation_config: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.tokenizer_source: TokenizerSource | None = None
        self.eos_token_ids: tuple[int, ...] = (int(self.config["eos_token_id"]),)

    def read(self, name: str, cuts: Any = ()) -> torch.Tensor:
        raise UserError(f"{self.path} has no tensors, {name} neither; it is filled with random numbers")

    def names_by_file(self) -> list[list[str]]:
        return []

    def close(self) -> None:
        """Nothing is open."""


def fill_random(model: nn.Module) -> None:
    """Draw every slot where it lies, by a seed of its own place in the model; of a tensor that ranks share each draws its
    part by a seed of its own, and what all hold is equal.
    """
    slots = model_slots(model)
    for number, (target, shape) in enumerate(model_shapes(model).items()):
        if target not in slots:
            continue
        view, part = slots[target], sum(size.start for size in shape if isinstance(size, Share))
        generator = torch.Generator(view.device).manual_seed(SEED + number + part * 1_000_003)
        if "a_log" in target:
            view.uniform_(0.0, 2.5, generator=generator)
        elif "norm" in target:
            view.normal_(1.0, 0.1, generator=generator)
        elif "bias" in target or view.dim() == 1:
            view.normal_(0.0, BIAS_DEVIATION, generator=generator)
        elif "embed" in target:
            view.normal_(0.0, 1.0, generator=generator)
        else:
            view.normal_(0.0, whole(shape[-1]) ** -0.5, generator=generator)
