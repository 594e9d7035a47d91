"""The MTP layer trained as it is used: chained over its own outputs, on text the frozen target wrote, towards the
target's law."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from soloist.train.loop import Schedule, autocast, fit_within
from soloist.train.mixers import Mla
from soloist.train.model import Ling, MtpBlock
from soloist.train.muon import optimiser_for
from soloist.train.sample import Sequences

# later steps of a chain matter less, because they only count where the earlier ones were right
STEP_DECAY = 0.7


class _Chain:
    """Attention of all chains of one batch: the true rows up to a chain's start, then the chain's own rows."""

    def __init__(self, attention: Mla) -> None:
        self.attention = attention
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, x: Tensor, step: int) -> Tensor:
        """x [B, T, D] normed: row p is step `step` of the chain that starts at p and sits at position p + step."""
        mla, length = self.attention, x.shape[1]
        angles = mla.angles(torch.arange(step, step + length, device=x.device))
        q = mla.queries(x, angles).float()
        k, v = mla.keys_values(*mla.latent(x, angles))
        self.keys.append(k.float())
        self.values.append(v.float())
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = [(q @ self.keys[0].mT).masked_fill(hidden, float("-inf"))]
        scores += [(q * own).sum(-1, keepdim=True) for own in self.keys[1:]]
        weights = (torch.cat(scores, -1) * (mla.nope + mla.rot) ** -0.5).softmax(-1)
        o = weights[..., :length] @ self.values[0]
        for index, own in enumerate(self.values[1:]):
            o = o + weights[..., length + index, None] * own
        return mla.output(o.to(v.dtype), x)


def chain(
    target: Ling,
    hidden: Tensor,
    following: Tensor,
    steps: int,
    teacher: Callable[[int], Tensor] | None = None,
    mtp: MtpBlock | None = None,
) -> list[Tensor]:
    """Run MTP chains from every position at once.

    Args: hidden [B, T, D] normed target states; following [B, T] the token after each position; teacher gives the token
        that step s reads, [B, T] (None: the chain reads its own best guesses).
    Returns: per step, hidden states [B, T, D] whose head predicts the token s + 2 after the position.
    """
    mtp = mtp or target.mtp
    attend = _Chain(mtp.attention)  # type: ignore[arg-type]
    tokens, state, out = following, hidden, []
    for step in range(steps):
        if step:
            tokens = teacher(step) if teacher else F.linear(state, target.lm_head.weight).argmax(-1)
        x = mtp.join(target.model.word_embeddings(tokens).float(), state)
        x = x + attend(mtp.input_layernorm(x), step)
        state = mtp.final_layernorm(mtp.ffn(x)[0])
        out.append(state)
    return out


class MtpTask:
    """Soft cross-entropy of chained MTP steps towards the frozen target."""

    def __init__(self, target: Ling, mtp: MtpBlock, texts: Sequences, steps: int, batch: int, lr: float, seed: int) -> None:
        self.target, self.module, self.texts, self.steps, self.batch, self.seed = target, mtp, texts, steps, batch, seed
        self.optimiser = optimiser_for(mtp, lr, weight_decay=0.0)
        self.tokens_per_step = batch * texts.ids.shape[1]

    def losses(self, step: int) -> dict[str, Tensor]:
        """Scalars of one step; `agree_k` is the share of positions where draft k equals the target's choice."""
        rng = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        rows = self.texts.rows(torch.randint(len(self.texts), (self.batch,), generator=rng).to(self.texts.ids.device))
        ids, length = rows.ids, rows.ids.shape[1]
        with torch.no_grad():
            hidden = self.target.hidden(ids)[0]
        usable = length - self.steps - 1

        def later(shift: int) -> Tensor:
            return ids[:, shift : shift + usable]

        states = chain(self.target, hidden[:, :usable], later(1), self.steps, lambda s: later(1 + s), self.module)
        position = torch.arange(usable, device=ids.device)
        out, total, weight_sum = {}, torch.zeros((), device=ids.device), 0.0
        for s, state in enumerate(states):
            # only drafts of the target's own text, up to its end
            inside = (position + 2 + s < rows.end[:, None]) & (position + 2 + s > rows.prompt[:, None])
            drafted = F.linear(state[inside], self.target.lm_head.weight).float().log_softmax(-1)
            with torch.no_grad():
                law = F.linear(hidden[:, 1 + s : 1 + s + usable][inside], self.target.lm_head.weight).float().softmax(-1)
            weight = STEP_DECAY**s
            total = total - weight * (law * drafted).sum(-1).mean()
            weight_sum += weight
            out[f"agree_{s + 1}"] = (drafted.argmax(-1) == law.argmax(-1)).float().mean()
        return {"loss": total / weight_sum, **out}

    def after_step(self, step: int) -> None:
        """Nothing outside the gradient: the router's bias stays as the joint training left it."""


@torch.no_grad()
def mtp_proposals(target: Ling, texts: Sequences, width: int, batch: int = 16) -> Tensor:
    """Greedy drafts [N, T, K]: entry n is what NEXTN proposes when ids[n] was just emitted."""
    device = texts.ids.device
    out = torch.zeros(*texts.ids.shape, width, dtype=torch.long, device=device)
    for start in range(0, len(texts), batch):
        ids = texts.ids[start : start + batch]
        with autocast(device):
            hidden = target.hidden(ids)[0]
            states = chain(target, hidden[:, :-1], ids[:, 1:], width)
            drafts = [F.linear(s, target.lm_head.weight).argmax(-1) for s in states]
        out[start : start + batch, 1:] = torch.stack(drafts, -1)
    return out


def with_mtp(target: Ling, seed: int) -> Ling:
    """A target without an MTP layer, with a new one."""
    grown = Ling(dataclasses.replace(target.shape, num_nextn_predict_layers=1), seed).to(target.head.device)
    grown.load_state_dict(target.state_dict(), strict=False)
    return grown.eval().requires_grad_(False)


def train_mtp(
    target: Ling,
    texts: Sequences,
    folder: str | Path,
    *,
    steps: int = 1500,
    chained: int = 3,
    batch: int = 32,
    lr: float = 1e-3,
    seed: int = 0,
    seconds: float | None = None,
    fresh: bool = False,
    say: Callable[[str], None] = print,
) -> MtpBlock:
    """Train the MTP layer of a frozen target, starting from what it holds.

    Args: target a `frozen` model; texts what it wrote (`sample.generate`); chained how many steps of a chain are
        trained; fresh whether the layer is new, so that its router has to learn too.
    Returns: the trained layer, fp32.
    """
    device = target.lm_head.weight.device
    mtp = MtpBlock(target.shape).to(device)
    mtp.load_state_dict({n: t.float() for n, t in target.mtp.state_dict().items()})
    mtp.mlp.gate.weight.requires_grad_(fresh)  # type: ignore[union-attr]
    task = MtpTask(target, mtp, texts, chained, batch, lr, seed)
    fit_within(task, Schedule(lr, steps, decay=0.7), Path(folder), seconds, log_every=50, say=say)
    return mtp
