"""Trainable Ling-3.0: KDA and gated MLA mixers, group-routed MoE, one MTP layer; parameters carry the public tensor
names.

The routed experts of a layer are two stacked tensors and every expert runs on every token, with weight zero where it
was not
chosen: at the widths of a small model one dense product is faster than sorting tokens. `export.py` splits them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soloist.errors import UserError
from soloist.train.mixers import Kda, Mla, Norm, linear
from soloist.train.shape import LingShape


class Swiglu(nn.Module):
    """Dense FFN."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            linear(width, inner),
            linear(width, inner),
            linear(inner, width),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)), None


def _ranks(scores: Tensor) -> Tensor:
    """Rank of each entry of the last axis, largest first, ties to the lowest index (pointwise, so it fuses)."""
    a, b = scores[..., :, None], scores[..., None, :]
    index = torch.arange(scores.shape[-1], device=scores.device)
    return ((b > a) | ((b == a) & (index[None, :] < index[:, None]))).sum(-1)


class Gate(nn.Module):
    """Group-limited sigmoid router. `expert_bias` only selects; it is balanced outside the gradient."""

    expert_bias: Tensor

    def __init__(self, shape: LingShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.num_experts, shape.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(shape.num_experts))
        self.groups, self.kept, self.chosen = shape.n_group, shape.topk_group, shape.num_experts_per_tok
        self.scale = shape.routed_scaling_factor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [N, E] fp32, zero where an expert was not chosen, and each expert's share of the choices [E]."""
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(F.linear(x.float(), self.weight.float()))
        with torch.no_grad():
            biased = (scores + self.expert_bias).unflatten(-1, (self.groups, -1))
            best_two = torch.where(_ranks(biased) < 2, biased, 0.0).sum(-1)
            kept = _ranks(best_two) < self.kept
            masked = torch.where(kept[..., None], biased, float("-inf")).flatten(-2)
            picked = _ranks(masked) < self.chosen
            load = picked.float().mean(0) / self.chosen
        weights = torch.where(picked, scores, 0.0)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scale, load


class Experts(nn.Module):
    """Stacked routed experts: gate_up [E, 2F, D], down [E, D, F]."""

    def __init__(self, shape: LingShape) -> None:
        super().__init__()
        e, d, f = shape.num_experts, shape.hidden_size, shape.moe_intermediate_size
        self.gate_up = nn.Parameter(torch.empty(e, 2 * f, d))
        self.down = nn.Parameter(torch.empty(e, d, f))


class Moe(nn.Module):
    """Routed experts plus one shared expert."""

    def __init__(self, shape: LingShape) -> None:
        super().__init__()
        self.gate, self.experts = Gate(shape), Experts(shape)
        self.shared_experts = Swiglu(shape.hidden_size, shape.moe_intermediate_size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        weights, load = self.gate(flat)
        e, width = self.experts.gate_up.shape[0], self.experts.down.shape[2]
        hidden = F.linear(flat, self.experts.gate_up.flatten(0, 1)).unflatten(-1, (e, 2 * width))
        gate, up = hidden.float().split(width, -1)
        active = (F.silu(gate) * up * weights[..., None]).to(hidden.dtype).flatten(-2)
        routed = F.linear(active, self.experts.down.permute(1, 0, 2).flatten(1))
        return (routed + self.shared_experts(flat)[0]).view(x.shape), load


class Block(nn.Module):
    """One layer: mixer and FFN, each on the normed residual stream."""

    def __init__(self, shape: LingShape, layer: int) -> None:
        super().__init__()
        is_mtp = layer >= shape.num_hidden_layers
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.attention: Kda | Mla = Mla(shape) if is_mtp or shape.is_mla(layer) else Kda(shape)
        dense = layer < shape.first_k_dense_replace
        self.mlp: Swiglu | Moe = Swiglu(shape.hidden_size, shape.intermediate_size) if dense else Moe(shape)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x + self.attention(self.input_layernorm(x))
        return self.ffn(x)

    def ffn(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The second half of the layer, and the load of its experts where it has any."""
        out, load = self.mlp(self.post_attention_layernorm(x))
        return x + out, load

    def step(self, x: Tensor, state: dict[str, Tensor], position: Tensor) -> Tensor:
        """One token of each sequence, x [B, D].   Writes: state."""
        x = x + self.attention.step(self.input_layernorm(x), state, position)
        return self.ffn(x)[0]


class MtpBlock(Block):
    """The next-next-token layer: joins a hidden state with the embedding of the token that follows it."""

    def __init__(self, shape: LingShape) -> None:
        super().__init__(shape, shape.num_hidden_layers)
        d, eps = shape.hidden_size, shape.rms_norm_eps
        self.enorm, self.hnorm, self.final_layernorm = Norm(d, eps), Norm(d, eps), Norm(d, eps)
        self.eh_proj = linear(2 * d, d)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Layer input from the next token's embedding and the normed hidden state; embedding half first."""
        return self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1)).float()

    def predict(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Hidden state [B, T, D] whose head gives the token two ahead, and the expert load."""
        x, load = self(self.join(embedded, hidden))
        return self.final_layernorm(x), load


class Trunk(nn.Module):
    """Embedding, layers (the MTP layer last) and final norm."""

    def __init__(self, shape: LingShape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocab_size, shape.hidden_size)
        layers: list[nn.Module] = [Block(shape, layer) for layer in range(shape.num_hidden_layers)]
        if shape.num_nextn_predict_layers:
            layers.append(MtpBlock(shape))
        self.layers = nn.ModuleList(layers)
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)


class Ling(nn.Module):
    """The whole trainable model. Residual stream fp32; matrix products in the autocast dtype."""

    def __init__(self, shape: LingShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.lm_head = linear(shape.hidden_size, shape.vocab_size)
        _initialise(self, seed)

    @property
    def blocks(self) -> list[Block]:
        """The main layers, without the MTP layer."""
        return [layer for layer in self.model.layers if isinstance(layer, Block) and not isinstance(layer, MtpBlock)]

    @property
    def embedding(self) -> Tensor:
        """[V, D]."""
        return self.model.word_embeddings.weight

    @property
    def head(self) -> Tensor:
        """[V, D]."""
        return self.lm_head.weight

    @property
    def num_layers(self) -> int:
        """Main layers."""
        return self.shape.num_hidden_layers

    @property
    def mtp(self) -> MtpBlock:
        """The MTP layer. Raises: UserError where the model has none."""
        last = self.model.layers[-1]
        if not isinstance(last, MtpBlock):
            raise UserError("this model has no MTP layer; train one with train mtp or set num_nextn_predict_layers to 1")
        return last

    def hidden(self, ids: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Run the main layers.

        Args: ids [B, T]; taps layers whose output (residual stream) is wanted.
        Returns: normed hidden state [B, T, D] fp32; tapped outputs; expert loads, one [E] per MoE layer.
        """
        x = self.model.word_embeddings(ids).float()
        tapped, loads = [], []
        for index, block in enumerate(self.blocks):
            x, load = block(x)
            if load is not None:
                loads.append(load)
            if index in taps:
                tapped.append(x)
        return self.model.norm(x), tapped, loads

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [B, T, V] fp32 of ids [B, T]."""
        return self.lm_head(self.hidden(ids)[0]).float()

    def empty_state(self, batch: int, length: int) -> list[dict[str, Tensor]]:
        """Decode state of `batch` sequences of up to `length` tokens."""
        device = self.lm_head.weight.device
        return [block.attention.empty_state(batch, length, device) for block in self.blocks]

    def step(self, ids: Tensor, state: list[dict[str, Tensor]], position: Tensor) -> Tensor:
        """Logits [B, V] fp32 after one more token of each sequence. ids [B]; position [1] long.   Writes: state."""
        x = self.model.word_embeddings(ids).float()
        for block, own in zip(self.blocks, state, strict=True):
            x = block.step(x, own, position)
        return self.lm_head(self.model.norm(x)).float()


def _initialise(model: Ling, seed: int) -> None:
    """Fill all parameters from one generator, in the order of their names, so that the device does not matter."""
    rng = torch.Generator().manual_seed(seed)
    depth = 2 * model.shape.num_hidden_layers
    for name, p in sorted(model.named_parameters()):
        with torch.no_grad():
            if name.endswith("norm.weight"):
                continue
            if name.endswith("word_embeddings.weight"):
                p.copy_(torch.randn(p.shape, generator=rng) * 0.2)
            elif name.endswith("A_log"):
                p.zero_()
            elif name.endswith("dt_bias"):
                # decays spread evenly in log time: one step forgets between 0.2 % and 40 %
                rate = torch.exp(torch.rand(p.shape, generator=rng) * math.log(0.5 / 0.002) + math.log(0.002)) / 5
                p.copy_(torch.log(rate / (1 - rate)))
            elif "conv1d" in name:
                p.copy_(torch.randn(p.shape, generator=rng) * 0.1)
                p[:, 0, -1] += 1.0
            else:
                std = 0.6 * p.shape[-1] ** -0.5
                if name.endswith(("o_proj.weight", "dense.weight", "down_proj.weight", "down")):
                    std /= depth**0.5
                if name.endswith("lm_head.weight"):
                    std = 0.02
                p.copy_(torch.randn(p.shape, generator=rng) * std)


def count_parameters(model: nn.Module) -> dict[str, Any]:
    """Parameters in all and in the largest parts."""
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    return {"total": total, "routed_experts": experts}
