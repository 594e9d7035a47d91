"""The smallest model with everything in it."""

from __future__ import annotations

from soloist.train.shape import LingShape

TINY = LingShape(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=4,
    layer_group_size=2,
    num_attention_heads=2,
    head_dim=16,
    intermediate_size=32,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=16,
)
