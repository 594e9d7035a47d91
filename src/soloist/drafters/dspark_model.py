"""The network of a DSpark drafter: fused features of the model, a block backbone, a Markov head, a confidence head.

Sources: the DSpark paper (arXiv 2607.05147), DFlash (arXiv 2602.06036), and the public checkpoints' tensors.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from soloist.dist.group import SOLO, Group
from soloist.dist.share import share
from soloist.drafters.dspark_formats import DraftConfig, DraftLayerConfig
from soloist.layers.feed_forward import Mlp
from soloist.layers.linear import Linear, Stream, Vector
from soloist.layers.rotary import Rotary
from soloist.models.sharing import share_attention, share_mlp
from soloist.ops.block_attention import block_attention
from soloist.ops.elementwise import sigmoid
from soloist.ops.rms_norm import rms_norm
from soloist.ops.rope import rope
from soloist.state.sequence import PagedSpec, Window

Rotation = tuple[torch.Tensor, torch.Tensor]


class DraftLayer(nn.Module):
    """A layer of the backbone. The context gives keys and values only, so they are made once and cached."""

    def __init__(self, config: DraftLayerConfig, hidden_size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.config, self.eps, self.dtype = config, eps, dtype
        c = config.attention
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.input_norm = Vector(hidden_size, dtype=dtype)
        self.q = Linear(hidden_size, {"weight": q}, dtype)
        self.kv = Linear(hidden_size, {"k": kv, "v": kv}, dtype)
        self.q_norm, self.k_norm = Vector(c.head_dim, dtype=dtype), Vector(c.head_dim, dtype=dtype)
        self.out = Linear(q, {"weight": hidden_size}, dtype)
        self.post_norm = Vector(hidden_size, dtype=dtype)
        self.mlp = Mlp(config.mlp, hidden_size, dtype)

    def cache_specs(self) -> tuple[PagedSpec, PagedSpec]:
        """Keys, values."""
        spec = PagedSpec(self.config.attention.num_kv_heads, self.config.attention.head_dim, self.dtype)
        return spec, spec

    def keys_values(self, x: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, D] -> keys, normed and turned, and values, [T, G, Dk] each. Context rows come without the layer's norm."""
        c = self.config.attention
        k, v = self.kv(x).view(x.shape[0], 2, -1, c.head_dim).unbind(1)
        return rope(rms_norm(k, self.k_norm.weight, self.eps), *rotation, c.rope.interleaved), v

    def forward(
        self, x: torch.Tensor, window: Window, rotation: Rotation, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """The block x [B, D], which starts where the window does -> [B, D]."""
        c, place = self.config, window.place
        normed = rms_norm(x, self.input_norm.weight, self.eps)
        q = self.q(normed).view(x.shape[0], -1, c.attention.head_dim)
        q = rope(rms_norm(q, self.q_norm.weight, self.eps), *rotation, c.attention.rope.interleaved)
        own = self.keys_values(normed, rotation)
        o = block_attention(q, *own, window.pages(keys), window.pages(values), place.table, place.start,
                            c.attention.scale, c.reach, c.causal)  # fmt: skip
        return self.mlp(Stream(x, self.out(o.flatten(1))), (self.post_norm.weight, self.eps)).whole


def _shared(layer: DraftLayerConfig, group: Group) -> DraftLayerConfig:
    return replace(layer, attention=share_attention(layer.attention, group), mlp=share_mlp(layer.mlp, group))


class MarkovHead(nn.Module):
    """What the token before a slot adds to the slot's logits. Kinds: vanilla, gated, rnn."""

    def __init__(self, config: DraftConfig, columns: int, dtype: torch.dtype):
        super().__init__()
        self.kind, rank, hidden = config.markov, config.markov_rank, config.hidden_size
        self.w1 = Vector(config.vocab_size, rank, dtype=dtype)
        self.w2 = Linear(rank, {"weight": columns}, dtype)
        if self.kind == "gated":
            self.joint = Linear(hidden + rank, {"weight": rank}, dtype, bias=True)
        elif self.kind == "rnn":
            self.joint = Linear(2 * rank + hidden, {"weight": 3 * rank}, dtype, bias=True)

    def memory(self, token: torch.Tensor) -> torch.Tensor:
        """token [1] -> [1, R]."""
        return self.w1.weight.index_select(0, token)

    def forward(
        self, hidden: torch.Tensor, memory: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [1, D] of the slot; memory of the token before it; state [1, R], zero for the first slot.

        Returns: (bias [1, V] fp32, of a shared vocabulary this rank's columns; the next slot's state).
        """
        if self.kind == "gated":
            memory = memory * sigmoid(self.joint(torch.cat((hidden, memory), -1)))
        elif self.kind == "rnn":
            gate, candidate, out = self.joint(torch.cat((state, memory, hidden), -1)).chunk(3, -1)
            gate = sigmoid(gate)
            state = gate * state + (1 - gate) * candidate.tanh()
            memory = out.tanh()
        return self.w2(memory).float(), state


class DsparkModel(nn.Module):
    """All weights of a drafter, or a rank's share of them; embedding and, for a whole vocabulary, head are the model's."""

    def __init__(self, config: DraftConfig, dtype: torch.dtype, device: torch.device, group: Group = SOLO):
        super().__init__()
        self.config, c = config, config
        D, eps = c.hidden_size, c.norm_eps
        with torch.device(device):
            self.fc = Linear(len(c.taps) * D, {"weight": D}, dtype)
            self.hidden_norm, self.norm = Vector(D, dtype=dtype), Vector(D, dtype=dtype)
            self.layers = nn.ModuleList(DraftLayer(_shared(layer, group), D, eps, dtype) for layer in c.layers)
            whole = c.draft_vocab_size == c.vocab_size
            drafted = share(c.vocab_size, group) if whole else c.draft_vocab_size
            self.markov = MarkovHead(c, drafted, dtype) if c.markov else None
            width = D + (c.markov_rank if c.confidence_with_markov else 0)
            self.confidence = Linear(width, {"weight": 1}, torch.float32, bias=True) if c.confidence else None
            self.head = None if whole else Linear(D, {"weight": c.draft_vocab_size}, dtype)
        self.rotary = Rotary(c.layers[0].attention.rope, device)

    def context(self, taps: tuple[torch.Tensor, ...], window: Window, caches: list[torch.Tensor]) -> None:
        """Write keys and values of the window's rows, made from the model's streams [T, D], at the window's places."""
        fused = rms_norm(self.fc(torch.cat(taps, -1)), self.hidden_norm.weight, self.config.norm_eps)
        rotation, place = self.rotary.tables(window.positions, window.base_length), window.place
        for layer, keys, values in zip(self.layers, caches[0::2], caches[1::2], strict=True):
            assert isinstance(layer, DraftLayer)
            keys[place.page, :, place.offset], values[place.page, :, place.offset] = layer.keys_values(fused, rotation)

    def block(self, x: torch.Tensor, window: Window, caches: list[torch.Tensor]) -> torch.Tensor:
        """Embedded block [B, D], which starts where the window does -> hidden states [B, D] of its slots."""
        positions = window.place.start + torch.arange(x.shape[0], device=x.device)
        rotation = self.rotary.tables(positions, window.base_length)
        for layer, keys, values in zip(self.layers, caches[0::2], caches[1::2], strict=True):
            x = layer(x, window, rotation, keys, values)
        return rms_norm(x, self.norm.weight, self.config.norm_eps)
