"""Trainable Ling-3.0: KDA and gated MLA mixers, group-routed MoE, one MTP layer; parameters carry the public tensor
names.

The routed experts of a layer are two stacked tensors and every expert runs on every token, with weight zero where it
was not
chosen: at the widths of a small model one dense product is faster than sorting tokens. `export.py` splits them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soloist.errors import UserError
from soloist.train.kda import decay, delta_rule, delta_step, unit


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


class Norm(nn.Module):
    """RMS norm with a plain weight; statistics in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()


def _linear(into: int, out: int) -> nn.Linear:
    return nn.Linear(into, out, bias=False)


class Conv(nn.Module):
    """Taps of one causal depthwise convolution [A, 1, W]; applied by `Kda`."""

    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 1, taps))


class Kda(nn.Module):
    """Kimi delta attention with the bounded decay and a full-rank sigmoid output gate."""

    q_conv1d: Conv
    k_conv1d: Conv
    v_conv1d: Conv

    def __init__(self, shape: LingShape) -> None:
        super().__init__()
        d, a, self.heads, self.width = shape.hidden_size, shape.inner, shape.num_attention_heads, shape.head_dim
        self.taps, self.lower_bound = shape.short_conv_kernel_size, shape.kda_lower_bound
        for name in ("q", "k", "v", "f", "g"):
            setattr(self, f"{name}_proj", _linear(d, a))
        for name in ("q", "k", "v"):
            setattr(self, f"{name}_conv1d", Conv(a, self.taps))
        self.b_proj = _linear(d, self.heads)
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(a))
        self.o_norm = Norm(self.width, shape.rms_norm_eps)
        self.o_proj = _linear(a, d)

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """One product for all inputs: [.., 3A] before the convolution, then f, z [.., A] and b [.., H]."""
        names = ("q", "k", "v", "f", "g", "b")
        out = F.linear(x, torch.cat([getattr(self, f"{n}_proj").weight for n in names]))
        a = self.heads * self.width
        return out.split([3 * a, a, a, self.heads], -1)

    def _conv_weight(self) -> Tensor:
        return torch.cat([self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight])[:, 0].float()

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, self.width)

    def _out(self, o: Tensor, z: Tensor) -> Tensor:
        o = self.o_norm(o) * torch.sigmoid(self._heads(z).float())
        return self.o_proj(o.flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] normed -> [B, T, D]."""
        qkv, f, z, b = self._projected(x)
        taps, length = self._conv_weight(), x.shape[1]
        padded = F.pad(qkv.float(), (0, 0, self.taps - 1, 0))
        rows = (padded[:, i : i + length] * taps[:, i] for i in range(1, self.taps))
        mixed = sum(rows, padded[:, :length] * taps[:, 0])
        q, k, v = F.silu(mixed).to(qkv.dtype).chunk(3, -1)
        o = delta_rule(
            self._heads(q),
            self._heads(k),
            self._heads(v),
            self._heads(f),
            torch.sigmoid(b.float()),
            self.A_log,
            self.dt_bias,
            self.lower_bound,
        )
        return self._out(o, z)

    def empty_state(self, batch: int, length: int, device: torch.device) -> dict[str, Tensor]:
        """State of `batch` sequences: recurrent matrices and the last pre-convolution rows."""
        a = self.heads * self.width
        return {
            "matrix": torch.zeros(batch, self.heads, self.width, self.width, device=device),
            "rows": torch.zeros(batch, self.taps - 1, 3 * a, device=device),
        }

    def step(self, x: Tensor, state: dict[str, Tensor], position: Tensor) -> Tensor:
        """One token of each sequence. x [B, D].   Writes: state."""
        qkv, f, z, b = self._projected(x)
        window = torch.cat([state["rows"], qkv.float()[:, None]], 1)
        state["rows"].copy_(window[:, 1:])
        mixed = F.silu((window * self._conv_weight().T).sum(1))
        q, k, v = (self._heads(part) for part in mixed.to(qkv.dtype).chunk(3, -1))
        g = decay(self._heads(f), self.A_log, self.dt_bias, self.lower_bound)
        o = delta_step(unit(q) * self.width**-0.5, unit(k), v.float(), g, torch.sigmoid(b.float()), state["matrix"])
        return self._out(o.to(qkv.dtype), z)


def rope(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate adjacent pairs of the last axis. x [..., T, R]; angles [T, R / 2]. fp32 inside, x's dtype out."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2).to(x.dtype)


class Mla(nn.Module):
    """Multi-head latent attention with one output gate per head."""

    def __init__(self, shape: LingShape) -> None:
        super().__init__()
        d, h = shape.hidden_size, shape.num_attention_heads
        self.heads, self.nope, self.rot = h, shape.qk_nope_head_dim, shape.qk_rope_head_dim
        self.value, self.rank, self.theta = shape.v_head_dim, shape.kv_lora_rank, shape.rope_theta
        self.q_proj = _linear(d, h * (self.nope + self.rot))
        self.kv_a_proj_with_mqa = _linear(d, self.rank + self.rot)
        self.kv_a_layernorm = Norm(self.rank, shape.rms_norm_eps)
        self.kv_b_proj = _linear(self.rank, h * (self.nope + self.value))
        self.g_proj = _linear(d, h)
        self.dense = _linear(h * self.value, d)

    def angles(self, positions: Tensor) -> Tensor:
        """Rotation angles [T, R / 2] fp32 of integer positions [T]."""
        power = torch.arange(0, self.rot, 2, device=positions.device, dtype=torch.float32) / self.rot
        return positions.float()[:, None] * self.theta**-power

    def queries(self, x: Tensor, angles: Tensor) -> Tensor:
        """[B, H, T, nope + rope]."""
        q = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return torch.cat([q[..., : self.nope], rope(q[..., self.nope :], angles)], -1)

    def latent(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Normed latent [B, T, R] and rotated shared key [B, T, rope]."""
        c, k_rot = self.kv_a_proj_with_mqa(x).split([self.rank, self.rot], -1)
        return self.kv_a_layernorm(c).to(c.dtype), rope(k_rot, angles)

    def keys_values(self, latent: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Expanded keys [B, H, T, nope + rope] and values [B, H, T, v]."""
        k, v = self.kv_b_proj(latent).unflatten(-1, (self.heads, -1)).transpose(1, 2).split([self.nope, self.value], -1)
        shared = k_rot[:, None].expand(-1, self.heads, -1, -1)
        return torch.cat([k, shared.to(k.dtype)], -1), v

    def output(self, o: Tensor, x: Tensor) -> Tensor:
        """Gate each head of o [B, H, T, v] and project."""
        gate = torch.sigmoid(self.g_proj(x).float()).to(o.dtype)
        return self.dense((o.transpose(1, 2) * gate[..., None]).flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] normed -> [B, T, D]."""
        angles = self.angles(torch.arange(x.shape[1], device=x.device))
        q = self.queries(x, angles)
        k, v = self.keys_values(*self.latent(x, angles))
        # the flash kernel wants one width for q, k and v
        v = F.pad(v, (0, q.shape[-1] - self.value))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., : self.value]
        return self.output(o, x)

    def empty_state(self, batch: int, length: int, device: torch.device) -> dict[str, Tensor]:
        """Latents and rotated keys of `length` positions for `batch` sequences."""
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return {
            "latent": torch.zeros(batch, length, self.rank, device=device, dtype=dtype),
            "rotated": torch.zeros(batch, length, self.rot, device=device, dtype=dtype),
        }

    def step(self, x: Tensor, state: dict[str, Tensor], position: Tensor) -> Tensor:
        """One token of each sequence at `position` [1], in the absorbed form. x [B, D].   Writes: state."""
        angles = self.angles(position)
        q = self.queries(x[:, None], angles)[:, :, 0]
        latent, k_rot = self.latent(x[:, None], angles)
        state["latent"].index_copy_(1, position, latent.to(state["latent"].dtype))
        state["rotated"].index_copy_(1, position, k_rot.to(state["rotated"].dtype))
        up_k, up_v = self.kv_b_proj.weight.view(self.heads, -1, self.rank).split([self.nope, self.value], 1)
        dtype = state["latent"].dtype
        q_latent = torch.einsum("bhn,hnr->bhr", q[..., : self.nope], up_k.to(q.dtype)).to(dtype)
        scores = q_latent @ state["latent"].mT + q[..., self.nope :].to(dtype) @ state["rotated"].mT
        seen = torch.arange(scores.shape[-1], device=x.device) <= position
        scores = scores.float() * (self.nope + self.rot) ** -0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        context = weights.to(dtype) @ state["latent"]
        o = torch.einsum("bhr,hvr->bhv", context.to(q.dtype), up_v.to(q.dtype))
        return self.output(o[:, :, None], x[:, None])[:, 0]


class Swiglu(nn.Module):
    """Dense FFN."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            _linear(width, inner),
            _linear(width, inner),
            _linear(inner, width),
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
        self.eh_proj = _linear(2 * d, d)

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
        self.lm_head = _linear(shape.hidden_size, shape.vocab_size)
        _initialise(self, seed)

    @property
    def blocks(self) -> list[Block]:
        """The main layers, without the MTP layer."""
        return [layer for layer in self.model.layers if isinstance(layer, Block) and not isinstance(layer, MtpBlock)]

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
