"""Sizes of a trainable Ling-3.0 model."""

from __future__ import annotations

import dataclasses

from soloist.errors import UserError


@dataclasses.dataclass(frozen=True)
class LingShape:
    """Sizes of a Ling-3.0 model, with the public field names of its config.json."""

    vocab_size: int = 8192
    hidden_size: int = 320
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    head_dim: int = 128
    layer_group_size: int = 4
    first_k_dense_replace: int = 1
    intermediate_size: int = 960
    num_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 64
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.5
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    rope_theta: float = 6_000_000.0
    short_conv_kernel_size: int = 4
    kda_lower_bound: float = -5.0
    rms_norm_eps: float = 1e-6
    num_nextn_predict_layers: int = 1

    def __post_init__(self) -> None:
        if self.num_experts % self.n_group or self.num_experts // self.n_group < 2:
            raise UserError(
                f"num_experts {self.num_experts} must be at least two per group of n_group {self.n_group}; change one of them"
            )
        if self.topk_group * (self.num_experts // self.n_group) < self.num_experts_per_tok:
            raise UserError(
                f"topk_group {self.topk_group} keeps too few experts for num_experts_per_tok {self.num_experts_per_tok}; raise it"
            )

    def is_mla(self, layer: int) -> bool:
        """True where a layer is full attention: every G-th, and the tail that does not fill a group."""
        group = self.layer_group_size
        return (layer + 1) % group == 0 or layer >= group * (self.num_hidden_layers // group)

    @property
    def inner(self) -> int:
        """Width of all KDA heads together."""
        return self.num_attention_heads * self.head_dim
