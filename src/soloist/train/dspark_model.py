"""The DSpark drafter as a trainable module: block backbone, Markov head, confidence head; and its files.

Format: DeepSpec native (config fields and tensor names), without the copies of embedding and head, which are the
target's. Sources: the DSpark paper and the public DeepSpec configuration.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soloist.errors import UserError
from soloist.train.mixers import Norm


@dataclasses.dataclass(frozen=True)
class DraftShape:
    """Sizes of a drafter, with DeepSpec's field names."""

    hidden_size: int
    vocab_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    num_target_layers: int
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 64
    intermediate_size: int = 960
    block_size: int = 7
    markov_rank: int = 64
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        ids = self.target_layer_ids
        if list(ids) != sorted(set(ids)) or not ids or ids[-1] >= self.num_target_layers - 1 or ids[0] < 0:
            raise UserError(
                f"target_layer_ids {list(ids)} must rise strictly within 0..{self.num_target_layers - 2}; "
                "the last layer's output is ambiguous and not allowed"
            )


class _Markov(nn.Module):
    def __init__(self, vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.01)
        nn.init.zeros_(self.markov_w2.weight)


class _Confidence(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)
        nn.init.zeros_(self.proj.weight)


def _rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Half-split rotary embedding of x [..., heads, hd] at integer positions [...]."""
    half = x.shape[-1] // 2
    power = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angle = positions.float()[..., None, None] * theta**-power
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).to(x.dtype)


class _Attention(nn.Module):
    """Block queries over the context and, in both directions, over their own block."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        d, hd = shape.hidden_size, shape.head_dim
        self.hd, self.theta = hd, shape.rope_theta
        self.repeat = shape.num_attention_heads // shape.num_key_value_heads
        self.q_proj = nn.Linear(d, shape.num_attention_heads * hd, bias=False)
        self.k_proj = nn.Linear(d, shape.num_key_value_heads * hd, bias=False)
        self.v_proj = nn.Linear(d, shape.num_key_value_heads * hd, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * hd, d, bias=False)
        self.q_norm, self.k_norm = Norm(hd, shape.rms_norm_eps), Norm(hd, shape.rms_norm_eps)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[..., H, hd] keys (normed, rotated) and values of rows x [..., D]."""
        k = _rotate(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.hd))), positions, self.theta)
        v = self.v_proj(x).unflatten(-1, (-1, self.hd))
        return k.repeat_interleave(self.repeat, -2).to(v.dtype), v.repeat_interleave(self.repeat, -2)

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor) -> Tensor:
        """x [B, N, G, D] normed blocks; context [B, S, D]; anchors [B, N] positions."""
        positions = anchors[..., None] + torch.arange(x.shape[2], device=x.device)
        q = _rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.hd))), positions, self.theta)
        k_own, v_own = self.keys_values(x, positions)
        past = torch.arange(context.shape[1], device=x.device)
        k_past, v_past = self.keys_values(context, past.expand(context.shape[0], -1))
        q = q.to(k_own.dtype)
        scores_past = torch.einsum("bnghd,bshd->bhngs", q, k_past).float()
        scores_past = scores_past.masked_fill((past >= anchors[..., None])[:, None, :, None], float("-inf"))
        scores_own = torch.einsum("bnghd,bnmhd->bhngm", q, k_own).float()
        weights = (torch.cat([scores_past, scores_own], -1) * self.hd**-0.5).softmax(-1).to(v_own.dtype)
        split = context.shape[1]
        o = torch.einsum("bhngs,bshd->bnghd", weights[..., :split], v_past)
        o = o + torch.einsum("bhngm,bnmhd->bnghd", weights[..., split:], v_own)
        return self.o_proj(o.flatten(-2))


class _Mlp(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn, self.mlp = _Attention(shape), _Mlp(shape)

    def forward(self, x: Tensor, context: Tensor, anchors: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, anchors)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The trainable drafter. Embedding and head are the target's and passed in."""

    def __init__(self, shape: DraftShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            d = shape.hidden_size
            self.fc = nn.Linear(len(shape.target_layer_ids) * d, d, bias=False)
            self.hidden_norm, self.norm = Norm(d, shape.rms_norm_eps), Norm(d, shape.rms_norm_eps)
            self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_hidden_layers))
            self.markov_head = _Markov(shape.vocab_size, shape.markov_rank)
            self.confidence_head = _Confidence(d + shape.markov_rank)

    def context(self, tapped: list[Tensor]) -> Tensor:
        """Fused target features [B, S, D] from K outputs [B, S, D]."""
        return self.hidden_norm(self.fc(torch.cat(tapped, -1)))

    def blocks(self, embedding: Tensor, context: Tensor, ids: Tensor, anchors: Tensor) -> Tensor:
        """Hidden states [B, N, G, D] of blocks anchored at positions anchors [B, N] of ids [B, S]."""
        tokens = ids.gather(1, anchors)[..., None].expand(-1, -1, self.shape.block_size).clone()
        tokens[..., 1:] = self.shape.mask_token_id
        x = F.embedding(tokens, embedding).float()
        for layer in self.layers:
            x = layer(x, context, anchors)
        return self.norm(x)

    def logit_parts(self, hidden: Tensor, head: Tensor, previous: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of backbone and Markov head [..., V], to be added, and the confidence logit [...] fp32.

        Args: hidden [..., D]; head [V, D], the target's; previous [...] the token before each slot.
        """
        memory = self.markov_head.markov_w1(previous)
        sure = self.confidence_head.proj(torch.cat([hidden, memory.to(hidden.dtype)], -1)).float()[..., 0]
        return F.linear(hidden, head), self.markov_head.markov_w2(memory), sure

    def logits(self, hidden: Tensor, head: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [..., V] fp32 and confidence logit [...] of slots hidden [..., D] after tokens previous [...]."""
        base, bias, sure = self.logit_parts(hidden, head, previous)
        return base.float() + bias.float(), sure


def draft_config(shape: DraftShape, target_config: dict[str, Any]) -> dict[str, Any]:
    """config.json in DeepSpec's native form."""
    fields = dataclasses.asdict(shape) | {"target_layer_ids": list(shape.target_layer_ids)}
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        **fields,
        "layer_types": ["full_attention"] * shape.num_hidden_layers,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
        "num_anchors": 0,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_scaling": None,
        "rope_is_neox_style": True,
        "max_position_embeddings": target_config.get("max_position_embeddings", 4096),
        "tie_word_embeddings": False,
        "embed_tokens_from_target": True,
        "lm_head_from_target": True,
        "eos_token_id": target_config.get("eos_token_id"),
        "pad_token_id": target_config.get("pad_token_id"),
    }


def save_drafter(
    drafter: Drafter, folder: Path, target_config: dict[str, Any], calibration: dict[str, Any] | None = None
) -> None:
    """Write config.json, model.safetensors (bf16) and calibration.json."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(draft_config(drafter.shape, target_config), indent=2) + "\n")
    tensors = {n: t.detach().cpu().bfloat16().contiguous() for n, t in drafter.state_dict().items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    if calibration is not None:
        (folder / "calibration.json").write_text(json.dumps(calibration, indent=1) + "\n")


def load_drafter(folder: Path) -> Drafter:
    """Read what `save_drafter` wrote."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    fields = {f.name: config[f.name] for f in dataclasses.fields(DraftShape)}
    drafter = Drafter(DraftShape(**(fields | {"target_layer_ids": tuple(fields["target_layer_ids"])})))
    drafter.load_state_dict({n: t.float() for n, t in load_file(str(folder / "model.safetensors")).items()})
    return drafter
