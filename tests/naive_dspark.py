"""DSpark from its formulas, as plainly as they can be said: fp64, one block at a time, nothing cached or fused.

It shares no code with soloist. Source: the DSpark paper and the published description of the checkpoints' tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Facts:
    """What a drafter is, told by the test and not read from its config."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    theta: float = 10000.0
    eps: float = 1e-6
    taps: tuple[int, ...] = (1, 3)
    block: int = 5
    anchor_first: bool = True
    mask: int = 99
    markov: str | None = "vanilla"
    rank: int = 8
    confidence: str | None = "markov"
    reach: int = 0
    causal: bool = False
    draft_ids: tuple[int, ...] | None = None

    @property
    def drafts(self) -> int:
        return self.block if self.anchor_first else self.block - 1


@dataclass(frozen=True)
class Drafted:
    """Greedy drafts of one block: hidden [K, D] of the slots that predict; logits [K, V]; chances [K]; lead: the smallest
    distance of a chosen token from the next best.
    """

    ids: list[int]
    hidden: torch.Tensor
    logits: torch.Tensor
    chances: torch.Tensor
    lead: float


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x: torch.Tensor, places: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate x [T, heads, width]: channel i pairs with i + width / 2."""
    half = x.shape[-1] // 2
    angle = places.double()[:, None, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + (-x).exp())


def draft(f: Facts, w: Tensors, embed: torch.Tensor, head: torch.Tensor, features: torch.Tensor, anchor: int) -> Drafted:
    """One block after `features` [n, K * D], the model's streams at the n places before the anchor's."""
    w = {name: tensor.double() for name, tensor in w.items()}
    n = len(features)
    context = norm(features.double() @ w["fc.weight"].T, w["hidden_norm.weight"], f.eps)
    x = embed.double()[[anchor] + [f.mask] * (f.block - 1)]
    for i in range(f.layers):
        p = f"layers.{i}."
        x = x + attention(f, w, p + "self_attn.", norm(x, w[p + "input_layernorm.weight"], f.eps), context, n)
        t = norm(x, w[p + "post_attention_layernorm.weight"], f.eps)
        gate = t @ w[p + "mlp.gate_proj.weight"].T
        x = x + (gate * sigmoid(gate) * (t @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
    hidden = norm(x, w["norm.weight"], f.eps)[0 if f.anchor_first else 1 :]
    return sample(f, w, hidden, hidden @ head.double().T, anchor)


def attention(f: Facts, w: Tensors, p: str, x: torch.Tensor, context: torch.Tensor, n: int) -> torch.Tensor:
    places = torch.arange(n + f.block)
    both = torch.cat((context, x))
    q = (x @ w[p + "q_proj.weight"].T).view(f.block, f.heads, f.head_dim)
    k = (both @ w[p + "k_proj.weight"].T).view(n + f.block, f.kv_heads, f.head_dim)
    v = (both @ w[p + "v_proj.weight"].T).view(n + f.block, f.kv_heads, f.head_dim)
    q = turn(norm(q, w[p + "q_norm.weight"], f.eps), places[n:], f.theta)
    k = turn(norm(k, w[p + "k_norm.weight"], f.eps), places, f.theta)
    rows = []
    for slot in range(f.block):
        for h in range(f.heads):
            g = h // (f.heads // f.kv_heads)
            seen = [
                p for p in range(n + f.block)
                if not (f.reach and n + slot - p >= f.reach) and not (f.causal and p > n + slot)
            ]  # fmt: skip
            weights = torch.softmax(k[seen, g] @ q[slot, h] * f.head_dim**-0.5, 0)
            rows.append(weights @ v[seen, g])
    return torch.stack(rows).view(f.block, -1) @ w[p + "o_proj.weight"].T


def sample(f: Facts, w: Tensors, hidden: torch.Tensor, base: torch.Tensor, anchor: int) -> Drafted:
    previous, state = anchor, torch.zeros(f.rank, dtype=torch.float64)
    ids, rows, chances, lead = [], [], [], float("inf")
    for k in range(f.drafts):
        h, logits = hidden[k], base[k]
        memory = w["markov_head.markov_w1.weight"][previous] if f.markov else torch.zeros(0, dtype=torch.float64)
        if f.markov:
            mixed = memory
            if f.markov == "gated":
                z = torch.cat((h, memory)) @ w["markov_head.gate_proj.weight"].T + w["markov_head.gate_proj.bias"]
                mixed = sigmoid(z) * memory
            elif f.markov == "rnn":
                z = torch.cat((state, memory, h)) @ w["markov_head.joint_proj.weight"].T
                z = z + w["markov_head.joint_proj.bias"]
                r = f.rank
                state = sigmoid(z[:r]) * state + (1 - sigmoid(z[:r])) * z[r : 2 * r].tanh()
                mixed = z[2 * r :].tanh()
            logits = logits + w["markov_head.markov_w2.weight"] @ mixed
        if f.confidence:
            z = torch.cat((h, memory)) if f.confidence == "markov" else h
            chances.append(sigmoid(z @ w["confidence_head.proj.weight"][0] + w["confidence_head.proj.bias"][0]))
        best = logits.topk(2)
        lead = min(lead, float(best.values[0] - best.values[1]))
        index = int(best.indices[0])
        previous = index if f.draft_ids is None else f.draft_ids[index]
        ids.append(previous)
        rows.append(logits)
    return Drafted(ids, hidden, torch.stack(rows), torch.stack(chances) if chances else torch.zeros(0), lead)
