"""A DSpark drafter for a frozen target: block backbone, Markov head, confidence head; trained on the target's own text.

Format: DeepSpec native (config fields and tensor names), without the copies of embedding and head, which are the
target's.
Sources: the DSpark paper and the public DeepSpec configuration; losses and anchors as described there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soloist.errors import UserError
from soloist.train.loop import Schedule, autocast, fit_within
from soloist.train.mixers import Norm
from soloist.train.model import Ling
from soloist.train.muon import optimiser_for
from soloist.train.sample import Sequences

SLOT_DECAY = 4.0
CE_WEIGHT, L1_WEIGHT = 0.1, 0.9


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

    def logits(self, hidden: Tensor, head: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [..., V] fp32 and confidence logit [...] of slots hidden [..., D] after tokens previous [...]."""
        memory = self.markov_head.markov_w1(previous)
        out = F.linear(hidden, head).float() + self.markov_head.markov_w2(memory).float()
        return out, self.confidence_head.proj(torch.cat([hidden, memory.to(hidden.dtype)], -1)).float()[..., 0]


def combine(logits: Tensor, law: Tensor, confidence: Tensor, labels: Tensor, live: Tensor) -> dict[str, Tensor]:
    """Losses and measures of blocks: logits, law [B, N, G, V]; confidence, labels and live (1 where supervised) [B,
    N, G]."""
    weight = live * torch.exp(-torch.arange(live.shape[-1], device=live.device) / SLOT_DECAY)
    total = weight.sum().clamp(min=1e-6)
    guess = logits.log_softmax(-1)
    ce = -guess.gather(-1, labels[..., None])[..., 0]
    distance = (guess.exp() - law).abs().sum(-1)
    accept = 1 - 0.5 * distance.detach()
    sure = F.binary_cross_entropy_with_logits(confidence, accept, reduction="none")
    ce, l1, bce = ((weight * x).sum() / total for x in (ce, distance, sure))
    with torch.no_grad():
        tau = 1 + (accept * live).cumprod(-1).sum(-1).mean()
        first = (logits[..., 0, :].argmax(-1) == law[..., 0, :].argmax(-1)).float().mean()
    return {
        "loss": CE_WEIGHT * ce + L1_WEIGHT * l1 + bce,
        "ce": ce,
        "l1": l1,
        "confidence": bce,
        "tau": tau,
        "first_agrees": first,
    }


class DsparkTask:
    """0.1 CE + 0.9 L1 to the target's law + confidence, over anchors drawn from the target's own text."""

    def __init__(self, target: Ling, drafter: Drafter, texts: Sequences, batch: int, anchors: int, lr: float, seed: int) -> None:
        self.target, self.module, self.texts = target, drafter, texts
        self.batch, self.anchors, self.seed = batch, anchors, seed
        self.optimiser = optimiser_for(drafter, lr, weight_decay=0.0)
        self.tokens_per_step = batch * anchors * drafter.shape.block_size
        on_gpu = texts.ids.is_cuda
        self.combine = torch.compile(combine, dynamic=False) if on_gpu else combine

    def losses(self, step: int) -> dict[str, Tensor]:
        """Scalars of one step; `tau` is the expected acceptance length at temperature 1, teacher-forced."""
        shape = self.module.shape
        rng = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        pick = torch.randint(len(self.texts), (self.batch,), generator=rng).to(self.texts.ids.device)
        rows = self.texts.rows(pick)
        ids, block = rows.ids, shape.block_size
        # anchors inside the answer, so that at least one label follows
        where = torch.rand(self.batch, self.anchors, generator=rng).to(ids.device)
        room = (rows.end - 1 - rows.prompt).clamp(min=1)[:, None]
        anchors = (rows.prompt[:, None] + (where * room).long()).clamp(max=ids.shape[1] - 2)
        with torch.no_grad():
            hidden, tapped, _ = self.target.hidden(ids, shape.target_layer_ids)
        head = self.target.lm_head.weight
        slots = self.module.blocks(self.target.model.word_embeddings.weight, self.module.context(tapped), ids, anchors)
        offset = anchors[..., None] + torch.arange(block, device=ids.device)
        live = (offset + 1 < rows.end[:, None, None]).float()
        safe = offset.clamp(max=ids.shape[1] - 2).flatten(1)
        previous, labels = (ids.gather(1, safe + s).view_as(offset) for s in (0, 1))
        logits, confidence = self.module.logits(slots, head, previous)
        with torch.no_grad():
            states = hidden.gather(1, safe[..., None].expand(-1, -1, hidden.shape[-1]))
            law = F.linear(states, head).float().softmax(-1).view_as(logits)
        return self.combine(logits, law, confidence, labels, live)

    def after_step(self, step: int) -> None:
        """Nothing outside the gradient."""


@torch.no_grad()
def dspark_proposals(target: Ling, drafter: Drafter, texts: Sequences, batch: int = 4) -> tuple[Tensor, Tensor]:
    """Greedy drafts [N, T, G] and confidence logits [N, T, G]: entry n is proposed when ids[n] was just emitted."""
    device, block = texts.ids.device, drafter.shape.block_size
    drafts = torch.zeros(*texts.ids.shape, block, dtype=torch.long, device=device)
    sure = torch.zeros(*texts.ids.shape, block, device=device)
    for start in range(0, len(texts), batch):
        ids = texts.ids[start : start + batch]
        anchors = torch.arange(ids.shape[1], device=device).expand(len(ids), -1)
        with autocast(device):
            _, tapped, _ = target.hidden(ids, drafter.shape.target_layer_ids)
            slots = drafter.blocks(target.model.word_embeddings.weight, drafter.context(tapped), ids, anchors)
            previous = ids
            for k in range(block):
                logits, confidence = drafter.logits(slots[:, :, k], target.lm_head.weight, previous)
                previous = logits.argmax(-1)
                drafts[start : start + batch, :, k], sure[start : start + batch, :, k] = previous, confidence
    return drafts, sure


def calibrate(texts: Sequences, drafts: Tensor, sure: Tensor, bins: int = 15) -> dict[str, Any]:
    """Sequential temperature scaling: one temperature per slot, left to right, smallest calibration error of the
    survival."""
    logits, alive = _outcomes(texts, drafts, sure)
    grid = torch.logspace(-1, 1, 41, dtype=torch.float64)
    survival = torch.ones(len(logits), dtype=torch.float64)
    raw = survival.clone()
    temperatures, before, after = [], [], []
    for k in range(logits.shape[1]):
        raw = raw * logits[:, k].sigmoid()
        errors = [_calibration_error(survival * (logits[:, k] / t).sigmoid(), alive[:, k], bins) for t in grid]
        best = min(range(len(errors)), key=errors.__getitem__)
        survival = survival * (logits[:, k] / grid[best]).sigmoid()
        temperatures.append(round(float(grid[best]), 4))
        before.append(round(_calibration_error(raw, alive[:, k], bins), 4))
        after.append(round(errors[best], 4))
    return {
        "temperatures": temperatures,
        "dataset": "held-out prompts, greedy",
        "num_samples": len(logits),
        "ece_before": before,
        "ece_after": after,
    }


def _outcomes(texts: Sequences, drafts: Tensor, sure: Tensor) -> tuple[Tensor, Tensor]:
    """Confidence logits [M, G] and whether the first k drafts were all right [M, G], at anchors with a whole block
    left."""
    block = drafts.shape[-1]
    logits, alive = [], []
    for row in range(len(texts)):
        low, high = int(texts.prompt[row]), int(texts.end[row]) - block
        if high <= low:
            continue
        truth = torch.stack([texts.ids[row, low + 1 + k : high + 1 + k] for k in range(block)], -1)
        alive.append((drafts[row, low:high] == truth).cumprod(-1))
        logits.append(sure[row, low:high])
    if not logits:
        raise UserError("no text is longer than one block; calibrate on longer texts")
    return torch.cat(logits).double().cpu(), torch.cat(alive).double().cpu()


def _calibration_error(predicted: Tensor, happened: Tensor, bins: int) -> float:
    index = (predicted * bins).long().clamp(max=bins - 1)
    count = torch.zeros(bins, dtype=torch.float64).index_add_(0, index, torch.ones_like(predicted))
    gap = torch.zeros(bins, dtype=torch.float64).index_add_(0, index, predicted - happened)
    return float(gap.abs().sum() / count.sum())


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


def train_dspark(
    target: Ling,
    texts: Sequences,
    folder: str | Path,
    *,
    mask_token_id: int,
    target_layer_ids: tuple[int, ...] = (1, 3, 5),
    block: int = 7,
    layers: int = 2,
    markov_rank: int = 64,
    steps: int = 3000,
    batch: int = 16,
    anchors: int = 64,
    lr: float = 2e-3,
    seed: int = 0,
    seconds: float | None = None,
    say: Callable[[str], None] = print,
) -> Drafter:
    """Train a drafter for a frozen target on text that the target wrote.

    Args: target a `frozen` model; texts from `sample.generate`; folder for checkpoint, log and curves.
    Returns: the drafter, fp32. Write it with `save_drafter`, after `calibrate`.
    """
    shape = DraftShape(
        hidden_size=target.shape.hidden_size,
        vocab_size=target.shape.vocab_size,
        target_layer_ids=target_layer_ids,
        mask_token_id=mask_token_id,
        num_target_layers=target.shape.num_hidden_layers,
        num_hidden_layers=layers,
        intermediate_size=3 * target.shape.hidden_size,
        block_size=block,
        markov_rank=markov_rank,
    )
    drafter = Drafter(shape, seed).to(target.lm_head.weight.device)
    task = DsparkTask(target, drafter, texts, batch, anchors, lr, seed)
    fit_within(task, Schedule(lr, steps, decay=0.8), Path(folder), seconds, log_every=50, say=say)
    return drafter
