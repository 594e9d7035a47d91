"""From a frozen target to its drafters: the NEXTN layer or DSpark, trained on the target's own text, calibrated, and
measured on prompts that were not trained on."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

import soloist
from soloist.errors import UserError
from soloist.runtime.assemble import choose_device
from soloist.train.acceptance import mean_length, ngram_proposals
from soloist.train.calibration import calibrate
from soloist.train.dspark import draft_shape, dspark_proposals, train_dspark
from soloist.train.dspark_model import save_drafter
from soloist.train.export import save_model
from soloist.train.material import Settings, prepare
from soloist.train.model import Ling
from soloist.train.mtp import mtp_proposals, train_mtp, with_mtp
from soloist.train.sample import Sequences, frozen
from soloist.train.target import load_subject

# NEXTN is measured as a chain of three; prompt lookup with as many tokens as DSpark drafts
CHAIN, BLOCK = 3, 7


def train_dspark_drafter(settings: Settings) -> dict[str, object]:
    """Train a DSpark drafter for any model and write it in DeepSpec's format.

    Returns: acceptance per domain beside that of prompt lookup, also written to `acceptance.json`.
    Raises: UserError for a model or prompts that cannot be had.
    """
    began = time.perf_counter()
    subject = load_subject(settings.model, choose_device(settings.device))
    material, target = prepare(subject, settings), subject.target
    drafter = train_dspark(
        target, material.texts, material.work / "dspark", draft_shape(target, subject.mask_token_id, block=BLOCK),
        steps=settings.steps or 0, seconds=settings.seconds, batch=settings.batch, anchors=settings.anchors,
        seed=settings.seed, say=settings.say,
    )  # fmt: skip
    calibration = calibrate(material.others, *dspark_proposals(target, drafter, material.others))
    out = settings.out or _beside(subject.path)
    save_drafter(drafter, out, {**subject.config, "max_position_embeddings": subject.max_length}, calibration)
    kinds: dict[str, Callable[[Sequences], Tensor]] = {
        "ngram": lambda texts: ngram_proposals(texts, BLOCK),
        "dspark": lambda texts: dspark_proposals(target, drafter, texts)[0],
    }
    for name, proposals in kinds.items():
        material.result[name] = _by_domain(name, proposals, material.tests, settings.say)
    return _finished(material.result, began, out)


def train_mtp_layer(settings: Settings) -> dict[str, object]:
    """Improve the NEXTN layer of a Ling-3.0 model that `train nano` made, or give it one, and write the model.

    Returns: acceptance per domain, also written to `acceptance.json`.
    Raises: UserError for a model or prompts that cannot be had, and for a family whose format has no such layer.
    """
    began, place = time.perf_counter(), choose_device(settings.device)
    subject = load_subject(settings.model, place)
    if not isinstance(subject.target, Ling):
        family = subject.config["architectures"][0]
        raise UserError(f"{subject.path}: {family} has no place for a NEXTN layer; use `soloist train dspark`")
    material, out = prepare(subject, settings), settings.out or (subject.path if _ours(subject.path) else Path("runs/nano-mtp"))
    target, fresh = subject.target, not subject.target.shape.num_nextn_predict_layers
    if fresh:
        target = with_mtp(target, settings.seed)
    else:
        before = _by_domain("mtp", lambda texts: mtp_proposals(target, texts, CHAIN), material.tests, settings.say)
        material.result["mtp_before"] = before
    trained = train_mtp(
        target, material.texts, material.work / "mtp", steps=settings.steps or 0, seconds=settings.seconds,
        batch=2 * settings.batch, seed=settings.seed, say=settings.say, fresh=fresh,
    )  # fmt: skip
    target.mtp.load_state_dict(trained.state_dict())
    stored = frozen(target, place)
    material.result["mtp"] = _by_domain("mtp", lambda texts: mtp_proposals(stored, texts, CHAIN), material.tests, settings.say)
    if out.resolve() != subject.path.resolve():
        shutil.copytree(subject.path, out, dirs_exist_ok=True)
    eos = subject.config["eos_token_id"]
    save_model(target, out, max_length=subject.max_length, eos=eos, pad=subject.config.get("pad_token_id", eos))
    return _finished(material.result, began, out)


def _beside(model: Path) -> Path:
    """Where the engine looks for a drafter, in a model's folder; for other models, a folder named after them."""
    return model / "dspark" if _ours(model) else Path("runs") / f"{model.stem}-dspark"


def _ours(model: Path) -> bool:
    """Whether this is a folder to write into: not a single file, and not the model inside the package."""
    return model.is_dir() and Path(soloist.__file__).parent not in model.resolve().parents


def _finished(result: dict[str, object], began: float, out: Path) -> dict[str, object]:
    result |= {"seconds": round(time.perf_counter() - began, 1), "out": str(out)}
    (out / "acceptance.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def _by_domain(
    name: str, proposals: Callable[[Sequences], Tensor], tests: dict[str, Sequences], say: Callable[[str], None]
) -> dict[str, object]:
    """Tokens per round on greedy texts of each domain, and the share of rounds that accept at least k drafts."""
    found: dict[str, object] = {}
    lengths = []
    for domain, texts in tests.items():
        length, slots = mean_length(texts.ids.cpu(), proposals(texts).cpu(), texts.prompt.cpu(), texts.end.cpu())
        shares = [round(share, 3) for share in slots]
        found[domain] = {"tokens_per_round": round(length, 3), "slots": shares, "prompts": len(texts)}
        lengths.append(length)
    found["average"] = round(sum(lengths) / len(lengths), 3)
    shown = "  ".join(f"{domain} {length:.2f}" for domain, length in zip(tests, lengths, strict=True))
    say(f"{name} tokens per round: {shown}  average {found['average']}")
    return found
