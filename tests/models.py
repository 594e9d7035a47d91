"""Small random decoders of every family, built without a checkpoint, and helpers that drive windows over them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from soloist.layers.linear import prepare
from soloist.models.decoder import Decoder
from soloist.models.registry import family_of, read_config
from soloist.state.sequence import Sequence
from soloist.weights.loader import model_slots

LING: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid", "vocab_size": 101,
    "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
    "layer_group_size": 3, "first_k_dense_replace": 1, "intermediate_size": 96, "num_experts": 16,
    "num_experts_per_tok": 4, "num_shared_experts": 1, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "q_lora_rank": None, "kv_lora_rank": 48,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "rope_theta": 6000000, "rope_scaling": None,
    "max_position_embeddings": 512, "short_conv_kernel_size": 4, "rms_norm_eps": 1e-6, "num_nextn_predict_layers": 1,
    "expert_swiglu_limit_list": [0, 0, 0, 0, 0.4, 0.4], "share_expert_swiglu_limit_list": [0, 0, 0, 0.5, 0.5, 0.7],
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 101, "hidden_size": 72, "num_hidden_layers": 3,
    "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 100, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 96,
    "max_position_embeddings": 512,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "ling-flash": LING,
    "ling-tiny": {**LING, "layer_group_size": 2, "q_lora_rank": 20, "num_nextn_predict_layers": 0},
    "llama": LLAMA,
    "llama-dynamic": {**LLAMA, "max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "qwen3": QWEN3,
    "qwen3-moe": {**QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 3,
                  "moe_intermediate_size": 24, "norm_topk_prob": True},
}  # fmt: skip

DEEP: dict[str, dict[str, Any]] = {"qwen3-deep": {**QWEN3, "num_hidden_layers": 6}}
"""Kinds that only the tests that name them use: cheap, with layers enough to read the streams of several."""


@cache
def decoder(kind: str, dtype: torch.dtype = torch.float32) -> Decoder:
    """A random decoder of one kind, ready to run."""
    generator = torch.Generator().manual_seed(len(kind))
    config = {**CONFIGS, **DEEP}[kind]
    model = Decoder(read_config(config), dtype, torch.device("cpu"))
    for name, slot in model_slots(model).items():
        spread = slot.shape[-1] ** -0.5 if slot.dim() > 1 else 0.3
        mean = 1.0 if "norm" in name else 0.0
        slot.copy_(torch.randn(slot.shape, generator=generator) * spread + mean)
    prepare(model)
    assert family_of(config)
    return model.eval()


def sequence(kind: str, dtype: torch.dtype = torch.float32, context: int = 256) -> Sequence:
    """A fresh state for that decoder."""
    state = Sequence(decoder(kind, dtype).cache_specs(), context, 16, torch.device("cpu"))
    state.reset(0)
    return state


def ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(101, (count,), generator=torch.Generator().manual_seed(seed))


def feed_prompt(model: Decoder, state: Sequence, prompt: torch.Tensor, chunk: int = 1 << 20) -> torch.Tensor:
    """Prefill in chunks; logits of all rows."""
    rows = []
    for start in range(0, len(prompt), chunk):
        part = prompt[start : start + chunk]
        out = model(part, state.prefill_window(len(part), start), state.caches)
        state.commit_prefill(len(part))
        rows.append(model.logits(out.hidden))
    return torch.cat(rows)


def feed_window(model: Decoder, state: Sequence, window: torch.Tensor, keep: int) -> torch.Tensor:
    """One round's forward over a window of which `keep` rows are committed; logits of all rows."""
    place = state.window(len(window), int(state.length) + len(window))
    out = model(window, place, state.caches)
    state.commit(torch.tensor([keep]))
    return model.logits(out.hidden)
