"""The engine in this process as a Target: no HTTP, and every round's own time."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from soloist.bench.observe import Call, room_for, round_calls
from soloist.bench.pinned import pinned_script, write_script
from soloist.bench.records import Card, Variant
from soloist.bench.target import Ending, Event, Prompt
from soloist.config import EngineConfig, SamplingParams
from soloist.drafters.registry import DSPARK_FOLDER
from soloist.drafters.scripted import ScriptedDrafter
from soloist.errors import UserError
from soloist.llm import LLM
from soloist.text.tokenizer import Tokenizer
from soloist.weights.checkpoint import open_checkpoint
from soloist.weights.hub import resolve_model_path

SAMPLED_BYTES, PIECE = 1 << 30, 1 << 20
"""A weight file above this size is hashed by pieces of PIECE bytes at 1024 even places, and the label says so."""


class InProcess:
    """One variant of a loaded model.   Args: before: called with the prompt and the sampling ahead of every request."""

    name = "in-process"

    def __init__(self, llm: LLM, before: Callable[[Prompt, Mapping[str, Any]], None] | None = None):
        self.llm, self._before = llm, before

    def serve(self, prompt: Prompt, sampling: Mapping[str, Any]) -> Iterator[Event]:
        """See Target. Raises: UserError for what the engine refuses."""
        if self._before is not None:
            self._before(prompt, sampling)
        assert prompt.token_ids is not None, prompt.name
        params, compiled = SamplingParams(**sampling), self._compiled
        begun = time.perf_counter()
        with closing(self.llm.stream(prompt.token_ids, params)) as events:  # type: ignore[type-var]
            for index, event in enumerate(events):
                t_ms, ids, ending = (time.perf_counter() - begun) * 1e3, tuple(event.token_ids), None
                if event.output is not None:
                    usage = event.output.usage
                    ending = Ending(
                        event.finish_reason, usage.prompt_tokens, usage.completion_tokens, "engine", usage.cached_tokens,
                        self._compiled - compiled,
                    )  # fmt: skip
                # A round emits its accepted drafts and one token of the model's own; the first event is the prefill's.
                drafted, accepted = (event.verified, len(ids) - 1) if index and ids else (None, None)
                yield Event(t_ms, ids, len(ids), event.text, False, drafted, accepted, event.round_ms, None, ending)

    @property
    def _compiled(self) -> int:
        """Kernels compiled in this process, and kinds of rounds that this variant met and captured."""
        return COMPILED.count + self.llm.engine.runner.num_prepared

    def round_calls(self, prompt: Prompt, sampling: Mapping[str, Any], widths: Sequence[int]) -> list[list[Call]]:
        """As `observe.round_calls`, behind as much of the prompt as leaves room."""
        if self._before is not None:
            self._before(prompt, sampling)
        assert prompt.token_ids is not None, prompt.name
        room = self.llm.plan.context_length - room_for(widths, len(widths) + 1)
        return round_calls(self.llm, prompt.token_ids[: max(room, 1)], widths)

    @cached_property
    def plain(self) -> LLM:
        """The same model without the drafter."""
        return self.llm.plain()

    def plan(self) -> dict[str, Any]:
        """The resolved Plan, without the model's path: the card names and hashes it, and a path tells of a machine."""
        return {name: value for name, value in asdict(self.llm.plan).items() if name != "model"}

    def close(self) -> None:
        """The model is shared; its owner closes it."""


class Models:
    """The loaded models of a card: one for every different set of engine settings, shared by the variants' drafters.

    They keep no prefixes: variants take turns on one sequence, where each would find what another has left.
    """

    def __init__(self, card: Card, folder: Path, progress: bool):
        """folder: for the scripts of pinned acceptance."""
        self._card, self._folder, self._progress = card, folder, progress
        self._loaded: dict[str, LLM] = {}

    def target(self, variant: Variant) -> InProcess:
        """Raises: UserError for a drafter or a setting that cannot be had."""
        settings = {"prefix_cache_bytes": 0, **self._card.settings, **variant.settings}
        path, acceptance = settings.pop("drafter_path", None), settings.pop("acceptance", EngineConfig.acceptance)
        key = json.dumps(settings, sort_keys=True)
        if key not in self._loaded:
            self._loaded[key] = LLM(self._card.model, progress=self._progress, **settings)
        llm = self._loaded[key]
        if variant.synthetic:
            return self._pinned(llm, variant)
        return InProcess(llm.with_drafter(variant.drafter, path, variant.draft_width, acceptance))

    def any(self) -> LLM:
        """One of the loaded models."""
        return next(iter(self._loaded.values()))

    def close(self) -> None:
        for llm in self._loaded.values():
            llm.close()

    def _pinned(self, llm: LLM, variant: Variant) -> InProcess:
        """The plain text is found first, then a script that spoils it where a round shall end."""
        assert variant.accept_length is not None and isinstance(variant.draft_width, int)
        length, width, plain, vocab_size = variant.accept_length, variant.draft_width, llm.plain(), LlmEncoder(llm).vocab_size
        path = self._folder / f"{variant.name}.script.json"
        write_script(path, [0])
        scripted = llm.with_drafter("scripted", str(path), width)
        drafter = scripted.engine.parts.drafter
        assert isinstance(drafter, ScriptedDrafter)
        scripts: dict[str, list[int]] = {}

        def prepare(prompt: Prompt, sampling: Mapping[str, Any]) -> None:
            key = json.dumps([prompt.token_ids, dict(sampling)], sort_keys=True)
            if key not in scripts:
                text = plain.generate(prompt.token_ids or (), SamplingParams(**sampling)).token_ids
                scripts[key] = pinned_script(text, width, length, vocab_size)
                write_script(path, scripts[key])
            drafter.load(scripts[key])

        return InProcess(scripted, prepare)


class LlmEncoder:
    """The prompts' Encoder of a loaded model."""

    def __init__(self, llm: LLM):
        self._llm, tokenizer = llm, llm.tokenizer
        self.vocab_size = llm.model_config.vocab_size if tokenizer is None else tokenizer.vocab_size
        self.vocab_size = min(self.vocab_size, llm.model_config.vocab_size)
        self.special_ids: Collection[int] = () if tokenizer is None else tokenizer.special_ids
        self.has_text = tokenizer is not None
        self.has_chat = tokenizer is not None and tokenizer.has_chat_template

    def encode(self, prompt: str | Sequence[dict[str, Any]]) -> list[int]:
        return self._llm.encode(prompt)


class _Compilations:
    """Counts kernels that Triton compiled, or loaded from its disk cache, in this process."""

    def __init__(self) -> None:
        self.count = 0
        try:
            from triton import knobs
        except ImportError:  # no Triton, nothing to compile
            return
        knobs.runtime.jit_post_compile_hook = self._compiled

    def _compiled(self, **kernel: Any) -> None:
        self.count += 1


COMPILED = _Compilations()


def weights_label(model: str, seed: int) -> str:
    """The hash of the weights as they are stored, or what random ones were drawn from."""
    if model.startswith("shapes:"):
        return f"random weights, seed {seed}"
    return files_sha256(_weight_files(resolve_model_path(model)))


def drafter_label(model: str, drafter: str, settings: Mapping[str, Any]) -> str:
    """The hash of a drafter that has files of its own, otherwise nothing.   Args: drafter: its name, `auto` resolved."""
    if drafter != "dspark":
        return ""
    path = settings.get("drafter_path")
    folder = resolve_model_path(path) if path else resolve_model_path(model) / DSPARK_FOLDER
    return files_sha256(_weight_files(folder)) if folder.exists() else ""


def tokenizer_label(tokenizer: Tokenizer | None, model: str) -> str:
    """The hash of the tokenizer's definition, with the chat templates."""
    if tokenizer is None:
        return "none"
    checkpoint = open_checkpoint(resolve_model_path(model))
    try:
        source = checkpoint.tokenizer_source
        assert source is not None
        text = json.dumps([source.json, dict(source.chat_templates)], sort_keys=True, default=str)
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    finally:
        checkpoint.close()


def _weight_files(path: Path) -> list[Path]:
    found = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("config.json")])
    if not found:
        raise UserError(f"{path}: holds no weights to hash")
    return found


def files_sha256(paths: Sequence[Path]) -> str:
    """Of names and contents."""
    digest, sampled = hashlib.sha256(), False
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= SAMPLED_BYTES:
                places, piece = range(0, size, PIECE), PIECE
            else:
                places, piece, sampled = range(0, size - PIECE, (size - PIECE) // 1023), PIECE, True
            for place in places:
                file.seek(place)
                digest.update(file.read(piece))
    return f"sha256{' of samples' if sampled else ''}:{digest.hexdigest()}"
