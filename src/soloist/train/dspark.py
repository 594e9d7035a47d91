"""Training a DSpark drafter for a frozen target, on text that the target wrote.

Losses and anchors as the DSpark paper describes them. Logits of all slots at once would be the largest tensor by far, so
the losses are taken block by block where they do not fit, and computed again for the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from soloist.train.dspark_model import Drafter, DraftShape
from soloist.train.features import Features
from soloist.train.loop import Schedule, autocast, fit_within
from soloist.train.muon import optimiser_for
from soloist.train.sample import Sequences
from soloist.train.target import Target

SLOT_DECAY = 4.0
CE_WEIGHT, L1_WEIGHT = 0.1, 0.9
# of a device's memory, what the logits of one part may take in fp32; gradients and the teacher's come on top
LOGITS_SHARE = 1 / 16
CPU_LOGITS_BYTES = 1 << 28
MEASURES = ("ce", "l1", "confidence", "tau", "first_agrees")


def combine(drafted: tuple[Tensor, Tensor], law: Tensor, confidence: Tensor, labels: Tensor, live: Tensor) -> Tensor:
    """Sums [5] over blocks, as MEASURES names them; the first three weighted by slot.

    Args: drafted: logits of backbone and Markov head [M, G, V]; law [M, G, V], the target's logits; confidence [M, G];
        labels [M, G]; live [M, G], 1 where supervised.
    """
    logits, law = drafted[0].float() + drafted[1].float(), law.float().softmax(-1)
    weight = slot_weights(live)
    guess = logits.log_softmax(-1)
    ce = -guess.gather(-1, labels[..., None])[..., 0]
    distance = (guess.exp() - law).abs().sum(-1)
    accept = 1 - 0.5 * distance.detach()
    sure = F.binary_cross_entropy_with_logits(confidence, accept, reduction="none")
    tau = 1 + (accept * live).cumprod(-1).sum(-1)
    first = (logits[:, 0].argmax(-1) == law[:, 0].argmax(-1)).float()
    return torch.stack([(weight * ce).sum(), (weight * distance).sum(), (weight * sure).sum(), tau.sum(), first.sum()])


def slot_weights(live: Tensor) -> Tensor:
    """live [..., G]: later slots matter less, because they only count where the earlier ones were right."""
    return live * torch.exp(-torch.arange(live.shape[-1], device=live.device) / SLOT_DECAY)


class DsparkTask:
    """0.1 CE + 0.9 L1 to the target's law + confidence, over anchors drawn from the target's own text."""

    def __init__(
        self, target: Target, drafter: Drafter, texts: Sequences, batch: int, anchors: int, lr: float, seed: int
    ) -> None:
        self.target, self.module, self.texts = target, drafter, texts
        self.batch, self.anchors, self.seed = batch, anchors, seed
        self.features = Features(target, texts, drafter.shape.target_layer_ids)
        self.optimiser = optimiser_for(drafter, lr, weight_decay=0.0)
        self.tokens_per_step = batch * anchors * drafter.shape.block_size
        self.combine = torch.compile(combine, dynamic=False) if texts.ids.is_cuda else combine

    def losses(self, step: int) -> dict[str, Tensor]:
        """Scalars of one step; `tau` is the expected acceptance length at temperature 1, teacher-forced."""
        block = self.module.shape.block_size
        rng = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        pick = torch.randint(len(self.texts), (self.batch,), generator=rng).to(self.texts.ids.device)
        rows = self.texts.rows(pick)
        ids, length = rows.ids, rows.ids.shape[1]
        # anchors inside the answer, so that at least one label follows
        where = torch.rand(self.batch, self.anchors, generator=rng).to(ids.device)
        room = (rows.end - 1 - rows.prompt).clamp(min=1)[:, None]
        anchors = (rows.prompt[:, None] + (where * room).long()).clamp(max=length - 2)
        hidden, tapped = self.features.rows(pick)
        slots = self.module.blocks(self.target.embedding, self.module.context(tapped), ids, anchors)
        offset = anchors[..., None] + torch.arange(block, device=ids.device)
        live = (offset + 1 < rows.end[:, None, None]).float().flatten(0, 1)
        safe = offset.clamp(max=length - 2).flatten(1)
        previous, labels = (ids.gather(1, safe + s).view(-1, block) for s in (0, 1))
        states = hidden.gather(1, safe[..., None].expand(-1, -1, hidden.shape[-1])).view(-1, block, hidden.shape[-1])
        sums = self._sums([slots.flatten(0, 1), states, previous, labels, live])
        per_slot, per_block = slot_weights(live).sum().clamp(min=1e-6), len(live)
        out = {name: sums[i] / (per_slot if i < 3 else per_block) for i, name in enumerate(MEASURES)}
        return {"loss": CE_WEIGHT * out["ce"] + L1_WEIGHT * out["l1"] + out["confidence"], **out}

    def after_step(self, step: int) -> None:
        """Nothing outside the gradient."""

    def _sums(self, blocks: list[Tensor]) -> Tensor:
        """`combine` over all blocks, in as many parts as memory asks for."""
        parts = -(-4 * blocks[2].numel() * self.target.head.shape[0] // logits_bytes(blocks[0].device))
        if parts == 1:
            return self._part(*blocks)
        each = zip(*(x.chunk(parts) for x in blocks), strict=True)
        return torch.stack([checkpoint(self._part, *part, use_reentrant=False) for part in each]).sum(0)

    def _part(self, slots: Tensor, states: Tensor, previous: Tensor, labels: Tensor, live: Tensor) -> Tensor:
        *drafted, confidence = self.module.logit_parts(slots, self.target.head, previous)
        with torch.no_grad():
            law = F.linear(states, self.target.head)
        return self.combine(tuple(drafted), law, confidence, labels, live)


def logits_bytes(device: torch.device) -> int:
    """What the logits of one part may take."""
    if device.type == "cpu":
        return CPU_LOGITS_BYTES
    return int(torch.cuda.get_device_properties(device).total_memory * LOGITS_SHARE)


@torch.no_grad()
def dspark_proposals(target: Target, drafter: Drafter, texts: Sequences, batch: int = 4) -> tuple[Tensor, Tensor]:
    """Greedy drafts [N, T, G] and confidence logits [N, T, G]: entry n is proposed when ids[n] was just emitted."""
    device, block = texts.ids.device, drafter.shape.block_size
    drafts = torch.zeros(*texts.ids.shape, block, dtype=torch.long, device=device)
    sure = torch.zeros(*texts.ids.shape, block, device=device)
    for start in range(0, len(texts), batch):
        ids = texts.ids[start : start + batch]
        anchors = torch.arange(ids.shape[1], device=device).expand(len(ids), -1)
        with autocast(device):
            _, tapped, _ = target.hidden(ids, drafter.shape.target_layer_ids)
            slots = drafter.blocks(target.embedding, drafter.context(tapped), ids, anchors)
            previous = ids
            for k in range(block):
                logits, confidence = drafter.logits(slots[:, :, k], target.head, previous)
                previous = logits.argmax(-1)
                drafts[start : start + batch, :, k], sure[start : start + batch, :, k] = previous, confidence
    return drafts, sure


def draft_shape(target: Target, mask_token_id: int, *, block: int = 7, layers: int = 2) -> DraftShape:
    """Sizes of a drafter for a target: two layers that read it at three places, or at five of a deep one."""
    vocab_size, width = target.head.shape
    last, places = target.num_layers - 2, 5 if target.num_layers >= 16 else 3
    taps = {round(1 + i * (last - 1) / (places - 1)) for i in range(places)} if last > 1 else {last}
    head_dim = 64 if width < 1024 else 128
    heads = max(1, width // head_dim)
    return DraftShape(
        hidden_size=width,
        vocab_size=vocab_size,
        target_layer_ids=tuple(sorted(taps)),
        mask_token_id=mask_token_id,
        num_target_layers=target.num_layers,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        # a small model's keys cost nothing; a large one shares each among four heads
        num_key_value_heads=heads if width < 1024 or heads % 4 else heads // 4,
        head_dim=head_dim,
        intermediate_size=3 * width,
        block_size=block,
        markov_rank=64 if width < 1024 else 256,
    )


def train_dspark(
    target: Target,
    texts: Sequences,
    folder: str | Path,
    shape: DraftShape,
    *,
    steps: int = 3000,
    batch: int = 16,
    anchors: int = 64,
    lr: float = 2e-3,
    seed: int = 0,
    seconds: float | None = None,
    say: Callable[[str], None] = print,
) -> Drafter:
    """Train a drafter for a frozen target on text that the target wrote.

    Args: texts from `sample.generate`; folder for checkpoint, log and curves.
    Returns: the drafter, fp32. Write it with `save_drafter`, after `calibrate`.
    """
    drafter = Drafter(shape, seed).to(target.head.device)
    task = DsparkTask(target, drafter, texts, batch, anchors, lr, seed)
    fit_within(task, Schedule(lr, steps, decay=0.8), Path(folder), seconds, log_every=50, say=say)
    return drafter
