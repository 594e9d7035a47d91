"""The trainable mixers of Ling-3.0, KDA and gated MLA, with the norm they share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soloist.train.kda import decay, delta_rule, delta_step, unit
from soloist.train.shape import LingShape


class Norm(nn.Module):
    """RMS norm with a plain weight; statistics in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()


def linear(into: int, out: int) -> nn.Linear:
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
            setattr(self, f"{name}_proj", linear(d, a))
        for name in ("q", "k", "v"):
            setattr(self, f"{name}_conv1d", Conv(a, self.taps))
        self.b_proj = linear(d, self.heads)
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(a))
        self.o_norm = Norm(self.width, shape.rms_norm_eps)
        self.o_proj = linear(a, d)

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
        self.q_proj = linear(d, h * (self.nope + self.rot))
        self.kv_a_proj_with_mqa = linear(d, self.rank + self.rot)
        self.kv_a_layernorm = Norm(self.rank, shape.rms_norm_eps)
        self.kv_b_proj = linear(self.rank, h * (self.nope + self.value))
        self.g_proj = linear(d, h)
        self.dense = linear(h * self.value, d)

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
