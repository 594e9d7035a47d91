"""What a drafter is trained and measured on: texts that its target wrote, after prompts of the right kind.

Prompts come from the corpus that the target was trained on where `train nano` left one; every other target invents its
own, so an empty folder is enough to begin with. Nothing that is measured or calibrated on is trained on.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from soloist.errors import UserError
from soloist.train.data import load_documents
from soloist.train.nano import DOMAINS
from soloist.train.prompts import cut_prompts, invented_prompts, named_prompts
from soloist.train.sample import Sequences, write
from soloist.train.target import Subject

# how often each domain's prompts are drawn, and the temperatures that the target writes at
SHARES = {"docs": 4, "code": 3, "chat": 4, "maths": 1, "json": 1}
TEMPERATURES = (0.0, 0.0, 0.0, 0.5, 0.8)
# most tokens of a prompt that is measured
PROMPT_TOKENS = 768
HELD_OUT = ("set:code", "set:chat", "set:maths", "set:summarisation", "set:retrieval", "set:multilingual")
# invented prompts to calibrate on are drawn with a seed of their own
CALIBRATION_SEED = 1 << 30

Prompts = list[list[int]]


@dataclasses.dataclass(frozen=True)
class Settings:
    """One run. out: folder of the drafter, or of the model with its NEXTN layer; work: folder for texts, checkpoints and
    curves; both have defaults beside the model. texts: how many the target writes to train on, `width` tokens each.
    prompts: more to train on, held_out: those to measure on, at most `measured` a domain (see `named_prompts`), answers of
    up to `answer` tokens. steps replaces minutes. batch: texts of a step; anchors: blocks of a text.
    """

    model: str
    out: Path | None = None
    work: Path | None = None
    texts: int = 16384
    width: int = 512
    prompts: tuple[str, ...] = ()
    held_out: tuple[str, ...] = HELD_OUT
    measured: int = 64
    answer: int = 256
    minutes: float = 5.0
    steps: int | None = None
    batch: int = 32
    anchors: int = 128
    seed: int = 0
    device: str = "auto"
    say: Callable[[str], None] = print

    def __post_init__(self) -> None:
        for name in ("texts", "width", "measured", "answer", "minutes", "batch", "anchors"):
            if getattr(self, name) <= 0:
                raise UserError(f"{name}={getattr(self, name)} must be above 0")
        if self.steps is not None and self.steps < 1:
            raise UserError(f"steps={self.steps} must be at least 1")

    @property
    def seconds(self) -> float | None:
        """The time budget, where there is one."""
        return None if self.steps else 60 * self.minutes


@dataclasses.dataclass
class Material:
    """Texts to train on, by domain to measure on, and others to calibrate on. result: what is known of the run so far."""

    work: Path
    texts: Sequences
    tests: dict[str, Sequences]
    others: Sequences
    result: dict[str, object]


def prepare(subject: Subject, settings: Settings) -> Material:
    """Let the target write what is trained and measured on. Texts to train on stay in the work folder, so that a run that
    was interrupted goes on with them.

    Raises: UserError for prompts that are not there, and for a work folder that holds texts of another run.
    """
    if settings.width > subject.max_length:
        raise UserError(f"width={settings.width} is more than the {subject.max_length} tokens that {subject.path.name} reads")
    began, work = time.perf_counter(), settings.work or default_work(subject.path)
    from_corpus = made_from(subject.path, work)
    tests, others = (_corpus_tests if from_corpus else _own_tests)(subject, work, settings)
    key = {
        "model": str(subject.path.resolve()), "texts": settings.texts, "width": settings.width, "seed": settings.seed,
        "prompts": list(settings.prompts), "temperatures": list(TEMPERATURES),
    }  # fmt: skip
    texts = _read_texts(work / "texts.pt", key, subject.target.head.device)
    if texts is None:
        prompts = (_corpus_prompts if from_corpus else _own_prompts)(subject, work, settings)
        banned = {tuple(p) for p in [*others, *(p for some in tests.values() for p in some)]}
        prompts = [p for p in prompts if tuple(p) not in banned and len(p) < settings.width]
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(settings.seed)).tolist()
        settings.say(f"the target writes {len(prompts)} texts of {settings.width} tokens")
        chosen = [prompts[i] for i in order]
        texts = write(subject.target, chosen, settings.width, subject.stop_ids, settings.seed, TEMPERATURES)
        work.mkdir(parents=True, exist_ok=True)
        torch.save({"key": json.dumps(key), **dataclasses.asdict(texts)}, work / "texts.pt")
    result: dict[str, object] = {
        "model": subject.path.name, "texts": len(texts), "tokens": int((texts.end - texts.prompt).sum()),
        "write_s": round(time.perf_counter() - began, 1), "seed": settings.seed,
    }  # fmt: skip
    settings.say(f"the target wrote {result['tokens']} tokens in {result['write_s']} s")
    measured = {domain: _answers(subject, some, settings.answer) for domain, some in tests.items() if some}
    return Material(work, texts, measured, _answers(subject, others, settings.answer), result)


def default_work(model: Path) -> Path:
    """The folder where `train nano` made this model, or one of its own."""
    base = Path("runs/work")
    return base if made_from(model, base) else base / model.stem


def made_from(model: Path, work: Path) -> bool:
    """Whether `work` holds the corpus that this model was trained on, in its own tokens."""
    theirs, own = work / "tokenizer" / "tokenizer.json", model / "tokenizer.json"
    return theirs.exists() and own.exists() and theirs.read_bytes() == own.read_bytes()


def _answers(subject: Subject, prompts: Prompts, most: int) -> Sequences:
    """Greedy answers of up to so many tokens."""
    found = write(subject.target, prompts, max(map(len, prompts)) + most, subject.stop_ids, 0)
    return dataclasses.replace(found, end=torch.minimum(found.end, found.prompt + most))


def _own_prompts(subject: Subject, work: Path, settings: Settings) -> Prompts:
    """Prompts from files where there are any, and as many invented ones as are missing."""
    given = [prompt for some in named_prompts(settings.prompts, subject).values() for prompt in some]
    missing = settings.texts - len(given)
    if missing > 0:
        settings.say(f"{subject.path.stem} invents {missing} prompts")
        given += invented_prompts(subject, missing, settings.seed, settings.width // 2)
    return given[: settings.texts]


def _own_tests(subject: Subject, work: Path, settings: Settings) -> tuple[dict[str, Prompts], Prompts]:
    """Named prompts that are not too long to measure on, and invented ones to calibrate on."""
    longest = min(PROMPT_TOKENS, subject.max_length - settings.answer)
    tests = {}
    for domain, prompts in named_prompts(settings.held_out, subject).items():
        tests[domain] = [p for p in prompts if len(p) <= longest][: settings.measured]
        if len(prompts) > len(tests[domain]):
            settings.say(f"{domain}: measured on {len(tests[domain])} of {len(prompts)} prompts")
    return tests, invented_prompts(
        subject, settings.measured, settings.seed + CALIBRATION_SEED, settings.width // 2
    )


def _corpus_prompts(subject: Subject, work: Path, settings: Settings) -> Prompts:
    """Beginnings of pages and conversations that the target was trained on, by domain."""
    found: Prompts = []
    for domain, share in SHARES.items():
        found += _cut(subject, work, "train", domain, settings.texts * share // sum(SHARES.values()), settings.seed)
    return found


def _corpus_tests(subject: Subject, work: Path, settings: Settings) -> tuple[dict[str, Prompts], Prompts]:
    """Beginnings of held-out pages, every other one to measure on, the rest to calibrate on."""
    cut = {domain: _cut(subject, work, "heldout", domain, 2 * settings.measured, 1) for domain in DOMAINS}
    return {domain: some[::2] for domain, some in cut.items()}, [p for some in cut.values() for p in some[1::2]]


def _cut(subject: Subject, work: Path, split: str, domain: str, count: int, seed: int) -> Prompts:
    documents = load_documents([work / f"{split}-{domain}.npz"])
    answer = subject.tokenizer.token_id("</think>")
    return cut_prompts(documents, count, seed, answer_after=None if domain in ("docs", "code") else answer)


def _read_texts(path: Path, key: dict[str, Any], device: torch.device) -> Sequences | None:
    """Texts that an earlier run of the same settings left.   Raises: UserError for those of other settings."""
    if not path.exists():
        return None
    saved = torch.load(path, map_location=device, weights_only=True)
    if json.loads(saved.pop("key")) != key:
        raise UserError(f"{path}: holds texts of another run (model, texts, width, seed or prompts differ); use another --work")
    return Sequences(**saved)
