"""Llama and Qwen3 as frozen targets: many sequences at once, in plain PyTorch.

The engine decodes one stream; a drafter is trained on thousands of texts. The weights are those of the engine's own
`Decoder`, filled from the same formats by the same rules; the loop over the layers is written anew, with a batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soloist.config import GqaConfig, MlpConfig
from soloist.errors import UserError
from soloist.layers.linear import Linear, Vector
from soloist.layers.mixers import GqaLayer
from soloist.models.decoder import Decoder, DecoderLayer

Attend = Callable[[Tensor, Tensor, Tensor, GqaConfig], Tensor]
"""q [B, H, T, D], k and v [B, G, T, D] -> [B, H, T, D]."""


class Dense(nn.Module):
    """A frozen `Decoder` of grouped-query attention and gated MLPs that runs batches. Residual stream fp32."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        for block in decoder.config.blocks:
            if not isinstance(block.mixer, GqaConfig) or not isinstance(block.mlp, MlpConfig):
                raise UserError(
                    f"{decoder.config.architecture}: drafters are trained for Llama, dense Qwen3 and the Ling-3.0 models of "
                    "train nano; this model has other layers"
                )
        self.decoder = decoder.requires_grad_(False).eval()

    @property
    def embedding(self) -> Tensor:
        """[V, D]."""
        return self.decoder.embed.weight

    @property
    def head(self) -> Tensor:
        """[V, D]."""
        weight = self.decoder.head.weight
        assert weight is not None
        return weight

    @property
    def num_layers(self) -> int:
        """Layers that can be tapped, and the last."""
        return self.decoder.config.num_layers

    def hidden(self, ids: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Run whole sequences.

        Args: ids [B, T]; taps layers whose output (residual stream) is wanted.
        Returns: normed hidden state [B, T, D] fp32; tapped outputs; no expert loads.
        """
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = F.embedding(ids, self.embedding).float()
        tapped = []
        for index, layer in enumerate(self.decoder.layers):
            x = self._layer(layer, x, positions, _causal)
            if index in taps:
                tapped.append(x)
        return self._norm(x, self.decoder.norm), tapped, []

    def empty_state(self, batch: int, length: int) -> list[dict[str, Tensor]]:
        """Keys and values of `batch` sequences of up to `length` tokens."""
        state = []
        for block in self.decoder.config.blocks:
            c = block.mixer
            size = (batch, c.num_kv_heads, length, c.head_dim)
            state.append({name: torch.zeros(size, dtype=self.head.dtype, device=self.head.device) for name in ("k", "v")})
        return state

    def step(self, ids: Tensor, state: list[dict[str, Tensor]], position: Tensor) -> Tensor:
        """Logits [B, V] fp32 after one more token of each sequence. ids [B]; position [1] long.   Writes: state."""
        x = F.embedding(ids, self.embedding).float()[:, None]
        for layer, own in zip(self.decoder.layers, state, strict=True):
            x = self._layer(layer, x, position, _Remember(own, position))
        return F.linear(self._norm(x[:, 0], self.decoder.norm), self.head).float()

    def _layer(self, layer: DecoderLayer, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """x [B, T, D] -> [B, T, D]; positions [T]."""
        mixer, mlp = layer.mixer, layer.mlp
        assert isinstance(mixer, GqaLayer)
        c = mixer.config
        qkv = _linear(self._norm(x, layer.input_norm), mixer.qkv).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
        q, k, v = qkv.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], 1)
        if c.qk_norm:
            q, k = self._norm(q, mixer.q_norm), self._norm(k, mixer.k_norm)
        angles = positions.float()[:, None] * self.decoder.rotaries[c.rope].inverse
        q, k = (_rotate(each, angles, c.rope.attention_factor, c.rope.interleaved).to(v.dtype) for each in (q, k))
        x = x + _linear(attend(q, k, v, c).transpose(1, 2).flatten(2), mixer.out)
        gate, up = _linear(self._norm(x, layer.post_norm), mlp.gate_up).chunk(2, -1)
        return x + _linear(F.silu(gate) * up, mlp.down)

    def _norm(self, x: Tensor, weight: Vector) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.decoder.config.norm_eps) * weight.weight.float()


class _Remember:
    """Attention of one new row over everything that was remembered.   Writes: state."""

    def __init__(self, state: dict[str, Tensor], position: Tensor) -> None:
        self.state, self.position = state, position

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, c: GqaConfig) -> Tensor:
        keys, values = (self.state[n].index_copy_(2, self.position, x) for n, x in (("k", k), ("v", v)))
        seen = torch.arange(keys.shape[2], device=q.device) <= self.position
        # the query heads of a group are rows of one product over the keys they share
        grouped = q.reshape(q.shape[0], c.num_kv_heads, -1, c.head_dim)
        o = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen[None, None, None], scale=c.scale)
        return o.view_as(q)


def _causal(q: Tensor, k: Tensor, v: Tensor, c: GqaConfig) -> Tensor:
    shared = c.num_heads != c.num_kv_heads
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=c.scale, enable_gqa=shared)


def _linear(x: Tensor, layer: Linear) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


def _rotate(x: Tensor, angles: Tensor, factor: float, interleaved: bool) -> Tensor:
    """x [B, H, T, D] by angles [T, D / 2]; fp32 inside."""
    x, cos, sin = x.float(), angles.cos() * factor, angles.sin() * factor
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
