"""Train the built-in model: corpus, tokenizer, main layers and MTP layer together, then the shipped folder."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from soloist.errors import UserError
from soloist.runtime.assemble import choose_device
from soloist.train.corpus import build_pages, unpack, write_pages
from soloist.train.data import Batches, Documents, load_documents
from soloist.train.export import save_model
from soloist.train.instruct import chat_pages
from soloist.train.loop import Schedule, autocast, fit_within
from soloist.train.model import Gate, Ling, count_parameters
from soloist.train.muon import optimiser_for
from soloist.train.shape import LingShape
from soloist.train.tokenizer import END_OF_TEXT, ROLE_END, encode_pages, save_tokenizer, token_id, train_tokenizer

DOMAINS = ("docs", "code", "chat", "maths", "json")
MTP_WEIGHT = 0.3
BIAS_STEP = 1e-3


def cross_entropy(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Mean negative log-likelihood. hidden [B, T, D]; head [V, D]; labels [B, T]."""
    return F.cross_entropy(F.linear(hidden, head).float().flatten(0, 1), labels.flatten())


@functools.cache
def _compiled_cross_entropy() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return torch.compile(cross_entropy, dynamic=False)


def compile_blocks(model: Ling) -> None:
    """Fuse the pointwise work of every layer. fla's kernels stay as they are."""
    for block in model.model.layers:
        block.compile(dynamic=False)


class NanoTask:
    """Next-token loss of the main layers plus the weighted loss of the MTP layer; expert biases balanced per step."""

    def __init__(self, model: Ling, batches: Batches, lr: float, weight_decay: float = 0.1) -> None:
        self.module = self.model = model
        self.optimiser = optimiser_for(model, lr, weight_decay)
        self.batches = batches
        self.device = model.lm_head.weight.device
        self.tokens_per_step = batches.batch_size * batches.length
        self.loss_of = _compiled_cross_entropy() if self.device.type == "cuda" else cross_entropy
        self.gates = [m for m in model.modules() if isinstance(m, Gate)]
        self.loads: list[Tensor] = []

    def losses(self, step: int) -> dict[str, Tensor]:
        """Scalars of one step; `loss` is the one to minimise."""
        ids = self.batches.batch(step).to(self.device, non_blocking=True)
        hidden, _, loads = self.model.hidden(ids[:, :-2])
        main = self.loss_of(hidden, self.model.lm_head.weight, ids[:, 1:-1])
        ahead, load = self.model.mtp.predict(self.model.model.word_embeddings(ids[:, 1:-1]).float(), hidden)
        mtp = self.loss_of(ahead, self.model.lm_head.weight, ids[:, 2:])
        self.loads = loads + ([load] if load is not None else [])
        worst = torch.stack(self.loads).max() * len(self.loads[0])
        return {"loss": main + MTP_WEIGHT * mtp, "next_token": main, "mtp": mtp, "load_max": worst}

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Move each expert's selection bias against its load (no auxiliary loss)."""
        for gate, load in zip(self.gates, self.loads, strict=True):
            gate.expert_bias += BIAS_STEP * torch.sign(load.mean() - load)
            gate.expert_bias -= gate.expert_bias.mean()


@torch.no_grad()
def bits_per_byte(model: Ling, documents: Documents, num_bytes: int, length: int = 4096) -> float:
    """Held-out compression: total negative log2-likelihood over the bytes of the text, end-of-text tokens included."""
    device = model.lm_head.weight.device
    ids = torch.from_numpy(documents.ids.astype(np.int64))
    total = 0.0
    for start in range(0, len(ids) - 1, length):
        window = ids[start : start + length + 1].to(device)[None]
        with autocast(device):
            hidden, _, _ = model.hidden(window[:, :-1])
            total += float(cross_entropy(hidden, model.lm_head.weight, window[:, 1:])) * (window.shape[1] - 1)
    return total / np.log(2) / num_bytes


def prepare(packages: Path, work: Path, seed: int = 0, vocab_size: int = 8192, max_length: int = 8192) -> None:
    """Corpus and tokenizer: from a folder of Debian packages to `work/{train,heldout}-DOMAIN.npz` and
    `work/tokenizer/`."""
    unpacked = work / "unpacked"
    unpack(packages, unpacked)
    pages = build_pages(unpacked)
    pages += chat_pages(pages, unpacked / "wordnet-base/usr/share/wordnet", seed)
    write_pages(pages, work)
    tokenizer = train_tokenizer([p for p in pages if not p.held_out], vocab_size, seed=seed)
    save_tokenizer(tokenizer, work / "tokenizer", max_length)
    for split in ("train", "heldout"):
        for domain in DOMAINS:
            chosen = [p for p in pages if p.domain == domain and p.held_out == (split == "heldout")]
            encoded = encode_pages(tokenizer, chosen)
            Documents(
                np.concatenate([np.asarray(e, np.uint16) for e in encoded]),
                np.asarray([len(e) for e in encoded], np.uint32),
            ).save(work / f"{split}-{domain}.npz")


def train_nano(
    out: str | Path,
    work: str | Path,
    *,
    packages: str | Path | None = None,
    shape: LingShape | None = None,
    steps: int = 6000,
    minutes: float | None = None,
    batch: int = 16,
    length: int = 4096,
    lr: float = 3e-3,
    seed: int = 0,
    device: str = "auto",
    say: Callable[[str], None] = print,
) -> dict[str, object]:
    """Train nano's main layers and MTP layer and write its folder.

    Args: out folder of the finished model; work folder for corpus, checkpoints and curves; packages folder of .deb
        files,
        needed once; minutes wall-clock budget that replaces `steps`.
    Returns: the run's card: steps, tokens, losses, held-out bits per byte per domain, versions.
    Raises: UserError where `work` holds no corpus and no packages are given.
    """
    out, work = Path(out), Path(work)
    if packages is not None and not (work / "train-docs.npz").exists():
        prepare(Path(packages), work, seed)
    if not (work / "corpus.json").exists():
        raise UserError(f"no corpus in {work}; pass packages, a folder of Debian documentation packages")
    place = choose_device(device)
    documents = load_documents([work / f"train-{d}.npz" for d in DOMAINS])
    model = Ling(shape or LingShape(), seed).to(place)
    if place.type == "cuda":
        compile_blocks(model)
    task = NanoTask(model, Batches(documents, batch, length, seed), lr)
    began = time.perf_counter()
    points = fit_within(task, Schedule(lr, steps), work / "run", None if minutes is None else 60 * minutes, say=say)
    last = points[-1] if points else {"step": 0}
    card: dict[str, object] = {
        "parameters": count_parameters(model),
        "shape": dataclasses.asdict(model.shape),
        "steps": last["step"],
        "tokens": last["step"] * batch * length,
        "corpus_tokens": len(documents.ids),
        "seconds": round(time.perf_counter() - began, 1),
        "seed": seed,
        "lr": lr,
        "batch": batch,
        "length": length,
        "torch": torch.__version__,
        "final": last,
        "device": torch.cuda.get_device_name() if place.type == "cuda" else "cpu",
    }
    write_nano(model, work, out, length)
    card["held_out_bits_per_byte"] = evaluate(model, work, length)
    (out / "training.json").write_text(json.dumps(card, indent=1) + "\n")
    return card


def write_nano(model: Ling, work: Path, out: Path, length: int) -> None:
    """Write weights, config and tokenizer files into `out`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(work / "tokenizer" / "tokenizer.json"))
    save_model(model, out, max_length=2 * length, eos=token_id(tokenizer, ROLE_END), pad=token_id(tokenizer, END_OF_TEXT))
    save_tokenizer(tokenizer, out, 2 * length)


def evaluate(model: Ling, work: Path, length: int = 4096) -> dict[str, float]:
    """Held-out bits per byte of each domain and of all together."""
    totals = json.loads((work / "corpus.json").read_text())["totals"]
    out: dict[str, float] = {}
    bits = num_bytes = 0.0
    for domain in DOMAINS:
        size = totals.get(f"heldout/{domain}", 0)
        path = work / f"heldout-{domain}.npz"
        if not size or not path.exists():
            continue
        out[domain] = bits_per_byte(model, load_documents([path]), size, length)
        bits, num_bytes = bits + out[domain] * size, num_bytes + size
    out["all"] = bits / num_bytes
    return out
