"""From a card to everything that a run needs: targets, prompts, hashes, the machine."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from soloist.bench.inprocess import LlmEncoder, Models, drafter_label, tokenizer_label, weights_label
from soloist.bench.machine import read_machine, uuids
from soloist.bench.prompts import Encoder, build_prompts, prompts_sha256
from soloist.bench.records import Card, Machine, Variant, Workload
from soloist.bench.target import Prompt, Target
from soloist.config import environment_threads
from soloist.errors import UserError
from soloist.text.tokenizer import Tokenizer, load_tokenizer
from soloist.weights.checkpoint import open_checkpoint
from soloist.weights.hub import resolve_model_path

if TYPE_CHECKING:
    from soloist.llm import LLM


T = TypeVar("T", Variant, Workload)


@dataclass
class Bench:
    """A card with everything it needs to run. `card` is complete: hashes of weights, tokenizer and prompts filled in."""

    card: Card
    targets: dict[str, Target]
    prompts: dict[str, list[Prompt]]
    machine: Machine
    model: LLM | None
    reference: LLM | None
    close: Callable[[], None]

    @property
    def on_gpu(self) -> bool:
        return self.model is not None and self.model.plan.device.startswith("cuda")

    @property
    def gpus(self) -> tuple[str, ...] | None:
        """As `Conditions` takes them: all of them where a server may use any."""
        return () if self.model is None else uuids(self.model.plan.device, self.model.config.tensor_parallel)


def prepare(card: Card, folder: Path, progress: bool = False) -> Bench:
    """Load the card's model and draw its prompts.   Raises: UserError for what cannot be had.

    folder: for what the run needs on disk while it lasts.
    """
    models = Models(card, folder, progress)
    targets: dict[str, Target] = {variant.name: models.target(variant) for variant in card.variants}
    llm = models.any()
    variants = tuple(
        dataclasses.replace(
            v, drafter_weights=drafter_label(card.model, targets[v.name].plan()["drafter"], {**card.settings, **v.settings})
        )
        for v in card.variants
    )
    weights, tokenizer = weights_label(card.model, card.seed), tokenizer_label(llm.tokenizer, card.model)
    card = dataclasses.replace(card, variants=variants, weights=weights, tokenizer=tokenizer)
    card, prompts = with_prompts(card, LlmEncoder(llm))
    machine = read_machine(llm.plan.threads)
    return Bench(card, targets, prompts, machine, llm, None, models.close)


def with_prompts(card: Card, encoder: Encoder | None) -> tuple[Card, dict[str, list[Prompt]]]:
    """The card with its prompts' hashes, and the prompts by workload, those of the warm-up last.

    Raises: UserError for a hash in the card that the prompts do not have.
    """
    prompts, workloads = {}, []
    for workload in card.workloads:
        made = build_prompts(workload, card.seed, encoder, card.warm_up)
        sha256 = prompts_sha256(made[: workload.num_prompts])
        if workload.prompts_sha256 not in ("", sha256):
            raise UserError(
                f"workload {workload.name}: its prompts have the hash {sha256}, the card wants {workload.prompts_sha256}; "
                "prompts, tokenizer or lengths differ"
            )
        prompts[workload.name] = made
        workloads.append(dataclasses.replace(workload, prompts_sha256=sha256))
    return dataclasses.replace(card, workloads=tuple(workloads)), prompts


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible server. variant: the card's variant that it runs; served_model: its name there; reference: a
    model to load here, whose plain text the answers must equal.
    """

    url: str
    variant: str | None = None
    served_model: str | None = None
    reference: str | None = None
    api_key: str | None = None


def prepare_server(card: Card, server: Server, progress: bool = False) -> Bench:
    """The card for one variant, which the server was started with.   Raises: UserError as `prepare`."""
    from soloist.bench.http import HttpTarget
    from soloist.llm import LLM

    card = dataclasses.replace(narrowed(card, [server.variant] if server.variant else []), target="http")
    if len(card.variants) != 1:
        names = ", ".join(v.name for v in card.variants)
        raise UserError(f"a server runs one way, and the card has {names}; say which it was started with: --variant NAME")
    (variant,) = card.variants
    if variant.synthetic:
        raise UserError(f"variant {variant.name}: acceptance cannot be pinned in a server; run it in process")
    target = HttpTarget(server.url, server.served_model, api_key=server.api_key)
    reference: LLM | None = None
    encoder: Encoder | None = None
    tokenizer: Tokenizer | None = None
    close: Callable[[], None] = target.close
    if server.reference is not None:
        reference = LLM(server.reference, progress=progress, **card.settings)
        encoder, close, tokenizer = LlmEncoder(reference), reference.close, reference.tokenizer
        weights, label = weights_label(server.reference, card.seed), tokenizer_label(tokenizer, server.reference)
        card = dataclasses.replace(card, weights=weights, tokenizer=label)
    elif (tokenizer := _local_tokenizer(card.model)) is not None:
        encoder = TokenizerEncoder(tokenizer)
        card = dataclasses.replace(card, tokenizer=tokenizer_label(tokenizer, card.model))
    if tokenizer is not None:
        target.count_text = TextCount(tokenizer)
    card, prompts = with_prompts(card, encoder)
    machine = read_machine(environment_threads() or os.cpu_count() or 1)
    return Bench(card, {variant.name: target}, prompts, machine, None, reference, close)


def narrowed(card: Card, variants: Sequence[str] = (), workloads: Sequence[str] = ()) -> Card:
    """The card with these variants and workloads, all of them for no names.   Raises: UserError for one it does not have."""
    return dataclasses.replace(
        card, variants=_named(card.variants, variants, "variant"), workloads=_named(card.workloads, workloads, "workload")
    )


def _named(items: tuple[T, ...], names: Sequence[str], kind: str) -> tuple[T, ...]:
    known = {item.name: item for item in items}
    for name in names:
        if name not in known:
            raise UserError(f"--{kind} {name}: the card has {', '.join(known)}")
    return tuple(item for name, item in known.items() if name in names) if names else items


class TokenizerEncoder:
    """The prompts' Encoder of a tokenizer without its model."""

    has_text = True

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.vocab_size, self.has_chat = tokenizer.vocab_size, tokenizer.has_chat_template
        self.special_ids: Collection[int] = tokenizer.special_ids

    def encode(self, prompt: str | Sequence[dict[str, Any]]) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        return self._tokenizer.encode(self._tokenizer.render_chat(prompt), add_special=False)


@dataclass(frozen=True)
class TextCount:
    """Tokens of a text."""

    tokenizer: Tokenizer

    def __call__(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special=False))


def _local_tokenizer(model: str) -> Tokenizer | None:
    """The tokenizer of a model that lies on this machine; None for a name that only the server knows."""
    if model not in ("nano", "smollm2") and not Path(model).expanduser().exists():
        return None
    checkpoint = open_checkpoint(resolve_model_path(model))
    try:
        return load_tokenizer(checkpoint.tokenizer_source)
    finally:
        checkpoint.close()
