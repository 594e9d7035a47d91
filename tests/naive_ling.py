"""Ling-3.0 from its formulas, as plainly as they can be said: fp64, one token after another, nothing cached or fused.

It shares no code with soloist and takes the public tensors as they are, so agreement means that both are right. Slow on
purpose. Source: the formulas of the public modelling code; the SwiGLU limits from the serving engines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass
class Outputs:
    """logits [T, V]; hidden [T, D], after the final norm; layers: the stream [T, D] after each layer; routes: layer ->
    chosen experts [T, K], best first; margin: the smallest lead of a chosen expert or group over the best left out.
    """

    logits: torch.Tensor
    hidden: torch.Tensor
    layers: list[torch.Tensor]
    routes: dict[int, torch.Tensor]
    margin: float


@dataclass
class NaiveLing:
    """One checkpoint: config.json and its tensors by public name."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    routes: dict[int, torch.Tensor] = field(default_factory=dict)
    margin: float = float("inf")

    def __call__(self, ids: torch.Tensor) -> Outputs:
        """ids [T] -> everything the model says about them."""
        self.routes, self.margin = {}, float("inf")
        x = self.w("model.word_embeddings.weight")[ids]
        layers = []
        for layer in range(self.config["num_hidden_layers"]):
            x = self.block(layer, x)
            layers.append(x)
        hidden = self.norm(x, "model.norm.weight")
        return Outputs(hidden @ self.w("lm_head.weight").T, hidden, layers, self.routes, self.margin)

    def mtp_logits(self, hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """The MTP layer at places 0 .. T - 1. Args: hidden [T, D] as in Outputs; following [T], the token after each
        place.   Returns: [T, V], the prediction for the token after `following`.
        """
        p = f"model.layers.{self.config['num_hidden_layers']}."
        embedding = self.norm(self.w("model.word_embeddings.weight")[following], p + "enorm.weight")
        joined = torch.cat((embedding, self.norm(hidden, p + "hnorm.weight")), -1)
        x = joined @ self.w(p + "eh_proj.weight").T
        x = x + self.mla(p + "attention.", self.norm(x, p + "input_layernorm.weight"))
        x = x + self.experts(p + "mlp.", self.norm(x, p + "post_attention_layernorm.weight"), 0.0, 0.0)
        return self.norm(x, p + "final_layernorm.weight") @ self.w("lm_head.weight").T

    def w(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.tensors[name]).double()

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt() * self.w(name)

    def block(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        c, p = self.config, f"model.layers.{layer}."
        group, L = c["layer_group_size"], c["num_hidden_layers"]
        is_mla = (layer + 1) % group == 0 or layer >= L - L % group
        mix = self.mla if is_mla else self.kda
        x = x + mix(p + "attention.", self.norm(x, p + "input_layernorm.weight"))
        t = self.norm(x, p + "post_attention_layernorm.weight")
        if layer < c["first_k_dense_replace"]:
            return x + self.gated(p + "mlp.", t, 0.0)
        routed, shared = ((c[name] or [0] * L)[layer] for name in LIMITS)
        return x + self.experts(p + "mlp.", t, routed, shared, layer)

    def kda(self, p: str, u: torch.Tensor) -> torch.Tensor:
        """Kimi Delta Attention over u [T, D], from an empty state."""
        c, T, H = self.config, len(u), self.config["num_attention_heads"]
        K = c["head_dim"]
        q, k, v = (self.conv(u @ self.w(f"{p}{n}_proj.weight").T, f"{p}{n}_conv1d.weight").view(T, H, K) for n in "qkv")
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        q = q * K**-0.5
        f = (u @ self.w(p + "f_proj.weight").T + self.w(p + "dt_bias")).view(T, H, K)
        decay = (c["kda_lower_bound"] * sigmoid(self.w(p + "A_log").exp()[:, None] * f)).exp()
        beta = sigmoid(u @ self.w(p + "b_proj.weight").T)
        state, rows = torch.zeros(H, K, K, dtype=torch.float64), []
        for t in range(T):
            state = decay[t][..., None] * state
            read = torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - read))
            rows.append(torch.einsum("hkv,hk->hv", state, q[t]))
        gate = sigmoid((u @ self.w(p + "g_proj.weight").T).view(T, H, K))
        out = self.norm(torch.stack(rows), p + "o_norm.weight") * gate
        return out.reshape(T, -1) @ self.w(p + "o_proj.weight").T

    def conv(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Causal depthwise convolution and SiLU; the last tap multiplies the current token."""
        taps = self.w(name)[:, 0]
        width = taps.shape[1]
        y = torch.zeros_like(x)
        for t in range(len(x)):
            for i in range(width):
                if t - i >= 0:
                    y[t] += taps[:, width - 1 - i] * x[t - i]
        return silu(y)

    def mla(self, p: str, u: torch.Tensor) -> torch.Tensor:
        """Multi-head latent attention in its expanded form over u [T, D]."""
        c, T, H = self.config, len(u), self.config["num_attention_heads"]
        nope, rope, v_dim, rank = (c[n] for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
        if c["q_lora_rank"]:
            u_q = self.norm(u @ self.w(p + "q_a_proj.weight").T, p + "q_a_layernorm.weight")
            q = u_q @ self.w(p + "q_b_proj.weight").T
        else:
            q = u @ self.w(p + "q_proj.weight").T
        q = q.view(T, H, nope + rope)
        latent, k_rope = (u @ self.w(p + "kv_a_proj_with_mqa.weight").T).split((rank, rope), -1)
        kv = self.norm(latent, p + "kv_a_layernorm.weight") @ self.w(p + "kv_b_proj.weight").T
        k_nope, v = kv.view(T, H, nope + v_dim).split((nope, v_dim), -1)
        q_rope, k_rope = self.rotate(q[..., nope:]), self.rotate(k_rope[:, None])
        scores = torch.einsum("qhd,khd->hqk", q[..., :nope], k_nope)
        scores = (scores + torch.einsum("qhd,kd->hqk", q_rope, k_rope[:, 0])) * (nope + rope) ** -0.5
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        gate = sigmoid(u @ self.w(p + "g_proj.weight").T)
        o = torch.einsum("hqk,khd->qhd", weights, v) * gate[..., None]
        return o.reshape(T, -1) @ self.w(p + "dense.weight").T

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Turn the adjacent pairs of x [T, heads, rope] by place times frequency."""
        assert not self.config["rope_scaling"], self.config["rope_scaling"]
        dim = x.shape[-1]
        frequency = float(self.config["rope_theta"]) ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = torch.arange(len(x), dtype=torch.float64)[:, None, None] * frequency
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = (even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin())
        return torch.stack(turned, -1).flatten(-2)

    def experts(
        self, p: str, x: torch.Tensor, routed: float, shared: float, layer: int | None = None
    ) -> torch.Tensor:
        """Routed experts and the shared one, with their limits."""
        scores, chosen = self.route(p, x @ self.w(p + "gate.weight").T)
        if layer is not None:
            self.routes[layer] = chosen
        rows = []
        for t in range(len(x)):
            weights = scores[t][chosen[t]]
            weights = weights / (weights.sum() + 1e-20) * self.config["routed_scaling_factor"]
            parts = [self.gated(f"{p}experts.{e}.", x[t], routed) for e in chosen[t].tolist()]
            rows.append(sum(weight * part for weight, part in zip(weights, parts, strict=True)))
        return torch.stack(rows) + self.gated(p + "shared_experts.", x, shared)

    def route(self, p: str, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [T, E] -> (scores [T, E], chosen experts [T, K])."""
        scores = sigmoid(logits)
        choice = scores + self.w(p + "gate.expert_bias")
        return scores, torch.stack([self.choose(row) for row in choice])

    def choose(self, choice: torch.Tensor) -> torch.Tensor:
        """The experts of one token: the best K inside the best groups. choice [E], biased scores."""
        c = self.config
        groups = choice.view(c["n_group"], -1)
        strength = groups.sort(descending=True).values[:, :2].sum(-1)
        kept = self.best(strength, c["topk_group"])
        allowed = torch.full_like(groups, float("-inf"))
        allowed[kept] = groups[kept]
        return self.best(allowed.flatten(), c["num_experts_per_tok"])

    def best(self, values: torch.Tensor, count: int) -> torch.Tensor:
        ordered, order = values.sort(descending=True)
        self.margin = min(self.margin, float(ordered[count - 1] - ordered[count]))
        return order[:count]

    def gated(self, p: str, x: torch.Tensor, limit: float) -> torch.Tensor:
        """A gated feed-forward; a limit > 0 bounds SiLU(gate) from above and up on both sides."""
        gate, up = silu(x @ self.w(p + "gate_proj.weight").T), x @ self.w(p + "up_proj.weight").T
        if limit > 0:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (gate * up) @ self.w(p + "down_proj.weight").T


LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + (-x).exp())


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * sigmoid(x)
