"""The Python API: one model, one stream."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

import torch

from soloist.config import EngineConfig, Plan, SamplingParams
from soloist.dist.group import Group, Lone
from soloist.drafters.drafter import Drafter, NoDraft
from soloist.drafters.registry import build_drafter, choose_drafter, is_auto, width_choice
from soloist.errors import UserError
from soloist.ops.accept import STOPPED
from soloist.runtime.assemble import assemble
from soloist.runtime.engine import FINISH, Engine, Request
from soloist.runtime.ranks import follow, in_step, lead
from soloist.runtime.runner import RoundResult, TokenLogprobs
from soloist.runtime.statistics import RequestClock, Timings
from soloist.text.grammar import Grammar, Grammars
from soloist.text.reasoning import reasoning_of
from soloist.text.stream import TextStream
from soloist.text.tokenizer import Tokenizer, load_tokenizer
from soloist.weights.checkpoint import open_checkpoint
from soloist.weights.hub import resolve_model_path

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]
"""Text, token ids, or chat messages (`{"role": ..., "content": ...}`), which the model's template renders."""


@dataclass(frozen=True)
class Usage:
    """cached_tokens: the prompt tokens that were not computed, because an earlier prompt began with them too."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class StreamEvent:
    """What one round brought. The last event of a request has `finish_reason`, and carries the whole output.

    drafted: tokens that were proposed in the round; verified: how many of them counted. round_ms: the engine's own time
    for it, for the first event the prefill's; None for a cancelled request.
    """

    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    output: Output | None = None
    drafted: int = 0
    verified: int = 0
    round_ms: float | None = None


@dataclass(frozen=True)
class Output:
    """A finished request. `stop_reason`: the stop string or the id from stop_token_ids that ended it, otherwise None.
    `text` is empty for a model without a tokenizer. It ends before a stop string; token_ids end with the token that
    completes it.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: str | int | None
    logprobs: list[TokenLogprobs] | None
    usage: Usage
    timings: Timings

    def to_dict(self) -> dict[str, Any]:
        """The keys of `--json`."""
        return asdict(self)


class LLM:
    """Loads a model and answers one request at a time; a second caller waits for the first.

    Args: the fields of EngineConfig as keywords.   Raises: UserError for anything that cannot be had. Under torchrun it
        returns on rank 0 alone: the others follow rank 0 until it closes, and then their processes end.
    """

    def __init__(self, model: str = EngineConfig.model, *, progress: bool = False, **settings: Any):
        unknown = set(settings) - set(EngineConfig.__dataclass_fields__)
        if unknown:
            known = ", ".join(EngineConfig.__dataclass_fields__)
            raise UserError(f"unknown setting {', '.join(sorted(unknown))}; LLM takes {known}")
        self.config = EngineConfig(model=str(model), **settings)
        checkpoint = open_checkpoint(resolve_model_path(self.config.model))
        try:
            self.tokenizer: Tokenizer | None = load_tokenizer(checkpoint.tokenizer_source)
            built = assemble(self.config, checkpoint, progress)
        finally:
            checkpoint.close()
        self._engine, self.plan, self.model_config = built.engine, built.plan, built.model_config
        self._group, self._number, self._numbers = built.group, 0, itertools.count(1)
        self.eos_token_ids = checkpoint.eos_token_ids
        self._slot = threading.Lock()
        self._cancelled = threading.Event()
        self._closed = False
        self._group.ready(self._slot.locked)
        if self._group.rank:
            self._follow()

    plan: Plan

    @property
    def group(self) -> Group:
        """The ranks that run this model."""
        return self._group

    def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Output:
        """Answer a prompt; returns when the request is finished."""
        for event in self.stream(prompt, params):
            if event.output is not None:
                return event.output
        raise AssertionError("a stream ended without its output")

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, cancelled: threading.Event | None = None
    ) -> Iterator[StreamEvent]:
        """Answer a prompt round by round. Closing the iterator cancels the request; `cancel()` does so from outside.

        cancelled: set it to end this request and no other, also before its turn has come.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise UserError(f"params is a {type(params).__name__}; give SamplingParams(...)")
        ids = self.encode(prompt)
        if params.stop and self.tokenizer is None:
            raise UserError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        self._check_open()
        self._engine.check(Request(tuple(ids), self.eos_token_ids, params))
        request = Request(tuple(ids), self.eos_token_ids, params, self._grammar(params, ids))
        return self._stream(request, cancelled or threading.Event())

    def _grammar(self, params: SamplingParams, prompt: list[int]) -> Grammar | None:
        if not params.constrained:
            return None
        assert params.response_format is not None
        return self._grammars.begin(params.response_format, reasoning_of(self._needs_tokenizer(), prompt))

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self._needs_tokenizer(), self.model_config.vocab_size, self.eos_token_ids)

    def _stream(self, request: Request, cancelled: threading.Event) -> Iterator[StreamEvent]:
        clock = RequestClock(self._engine.widths)
        with self._slot:
            self._check_open()
            self._cancelled.clear()
            answer = _Answer(request, self.tokenizer, clock)
            if cancelled.is_set():
                yield answer.cancel()
                return
            rounds = self._rounds(request)
            try:
                for result in rounds:
                    answer.cached_tokens = self._engine.prefixes.begun
                    if self._cancelled.is_set() or cancelled.is_set():
                        yield answer.cancel()
                        return
                    if result is None:
                        continue
                    event = answer.take(result)
                    yield event
                    if event.output is not None:
                        return
            finally:
                rounds.close()  # type: ignore[attr-defined]

    def _rounds(self, request: Request) -> Iterator[RoundResult | None]:
        """The engine's results, on all ranks in step. They must draw the same seed, so it is drawn here."""
        if self._group.size == 1 or isinstance(self._group, Lone):
            return self._engine.run(request)
        params = request.params
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(63))
        task = {"answer": list(request.prompt), "params": asdict(params), "llm": self._number}
        return lead(self._group, self._engine, task, replace(request, params=params))

    def _follow(self) -> NoReturn:
        """Do what rank 0 does until it closes; then end the process."""
        group, twins = self._group, {0: self}
        try:
            while (task := group.broadcast_object()) is not None:
                if "drafter" in task:
                    with suppress(UserError):  # rank 0 meets the same one and tells
                        twins[task["llm"]] = self._build_twin(EngineConfig(**task["drafter"]))
                elif "logits" in task:
                    self._engine.logits(tuple(task["logits"]))
                else:
                    params = SamplingParams(**task["params"])
                    prompt, twin = task["answer"], twins[task["llm"]]
                    request = Request(tuple(prompt), self.eos_token_ids, params, self._grammar(params, prompt))
                    follow(group, twin._engine, request)
        except BaseException as error:
            group.abandon(error)
            raise
        group.close()
        raise SystemExit(0)

    def cancel(self) -> None:
        """End the running request after its current round, with finish_reason `cancelled`. Safe from other threads."""
        self._cancelled.set()

    def plain(self) -> LLM:
        """The same loaded model without its drafter, to compare with. The two take turns, and share the memory."""
        config = replace(
            self.config, drafter=NoDraft.name, drafter_path=None, draft_width="auto", acceptance="equality"
        )  # fmt: skip
        return self._announce_twin(config)

    def with_drafter(
        self,
        drafter: str,
        drafter_path: str | None = None,
        draft_width: int | str = EngineConfig.draft_width,
        acceptance: str = EngineConfig.acceptance,
    ) -> LLM:
        """The same loaded model with another drafter, as `plain`.   Raises: UserError for one that cannot be had."""
        config = replace(
            self.config, drafter=drafter, drafter_path=drafter_path, draft_width=draft_width, acceptance=acceptance
        )
        return self._announce_twin(config)

    def _announce_twin(self, config: EngineConfig) -> LLM:
        """All ranks build it, and know it by its number."""
        with self._slot:
            number = next(self._numbers)
            self._group.broadcast_object({"drafter": asdict(config), "llm": number})
            twin = self._build_twin(config)
        twin._number = number
        return twin

    def _build_twin(self, config: EngineConfig) -> LLM:
        if config.drafter == NoDraft.name:
            return self._twin(config, NoDraft())
        checkpoint = open_checkpoint(resolve_model_path(config.model))
        try:
            name = choose_drafter(config, checkpoint, self.model_config)
            twin = self._twin(config, build_drafter(name, config, checkpoint, self._engine.parts.model))
        finally:
            checkpoint.close()
        twin._engine.warm_up()
        return twin

    def _twin(self, config: EngineConfig, drafter: Drafter) -> LLM:
        twin = object.__new__(LLM)
        twin.__dict__.update(self.__dict__)
        twin.config = config
        widths = in_step(width_choice(config, drafter), self._group)
        twin._engine = self._engine.drafting(drafter, widths, config.acceptance == "rejection")
        adapts = bool(drafter.width) and is_auto(config)
        twin.plan = replace(
            self.plan, drafter=drafter.name, draft_width=drafter.width, width_choice="auto" if adapts else "fixed",
            acceptance=config.acceptance, window=drafter.width + 1,
        )  # fmt: skip
        return twin

    @property
    def engine(self) -> Engine:
        """What runs the requests; for measuring. Not to be used while a request runs."""
        self._check_open()
        return self._engine

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Teacher-forced logits after every token of a text: [T, V] fp32, on the CPU."""
        self._check_open()
        ids = tuple(_items(token_ids))
        with self._slot:
            self._engine.check_text(ids)
            self._group.broadcast_object({"logits": ids})
            return self._engine.logits(ids).cpu()

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids. Raises: UserError for a prompt of no known kind, or text without a tokenizer."""
        if isinstance(prompt, str):
            return self._needs_tokenizer().encode(prompt)
        items = _items(prompt)
        if items and all(isinstance(item, dict) for item in items):
            tokenizer = self._needs_tokenizer()
            return tokenizer.encode(tokenizer.render_chat(items), add_special=False)
        return items

    def _needs_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError(f"{self.plan.model} has no tokenizer; give the prompt as token ids")
        return self.tokenizer

    def _check_open(self) -> None:
        if self._closed:
            raise UserError("this LLM is closed; make a new one")

    def close(self) -> None:
        """Free the model. Waits for a running request; call `cancel()` first to end it."""
        with self._slot:
            self._closed = True
            self.__dict__.pop("_engine", None)
            self._group.close()

    def __reduce__(self) -> NoReturn:
        raise UserError("an LLM can neither be copied nor sent to another process; make one there, with the same settings")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _items(prompt: Any) -> list[Any]:
    """What a prompt lists. Arrays of ids (torch, numpy) give plain numbers; what would give others than were meant, as
    the letters of bytes or the order of a set, is refused.
    """
    refused = str | bytes | bytearray | memoryview | Mapping | Set
    listed = prompt.tolist() if hasattr(prompt, "tolist") and not isinstance(prompt, refused) else prompt
    if isinstance(listed, refused) or not isinstance(listed, Iterable):
        raise UserError(f"the prompt is a {type(prompt).__name__}; give text, a list of token ids, or chat messages")
    items = list(listed)
    if items and all(isinstance(item, str) for item in items):
        raise UserError("the prompt is a list of texts; a request answers one, so call generate for each")
    return items


class _Answer:
    """Collects the rounds of a request into text, and cuts them at a stop string."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, clock: RequestClock):
        self.request, self.clock = request, clock
        stops, min_tokens = tuple(request.params.stop), request.params.min_tokens
        self.stream = None if tokenizer is None else TextStream(tokenizer, stops, min_tokens)
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if request.params.logprobs is None else []
        self.text: list[str] = []
        self.started = False
        self.cached_tokens = 0
        self.drafted = self.verified = 0
        self.round_ms: float | None = None

    def take(self, result: RoundResult) -> StreamEvent:
        """Account for a round's tokens. The event has an output if the request is finished."""
        stopped_by_id = result.done == STOPPED
        shown = result.tokens[:-1] if stopped_by_id else result.tokens
        text, used, stop = self._push(shown)
        if stop is None:
            used = len(result.tokens)
        self._count(result, used)
        self.drafted, self.verified, self.round_ms = result.drafted, result.verified, result.ms
        tokens = result.tokens[:used]
        self.token_ids += tokens
        logprobs = None if result.logprobs is None else result.logprobs[:used]
        if self.logprobs is not None and logprobs is not None:
            self.logprobs += logprobs
        if stop is not None:
            return self._finish(tokens, text, logprobs, "stop", stop)
        if result.running:
            self.text.append(text)
            return StreamEvent(tokens, text, logprobs, None, None, self.drafted, self.verified, self.round_ms)
        text += self.stream.flush() if self.stream else ""
        reason: int | None = tokens[-1] if stopped_by_id and tokens[-1] in self.request.params.stop_token_ids else None
        return self._finish(tokens, text, logprobs, FINISH[result.done], reason)

    def cancel(self) -> StreamEvent:
        text = self.stream.flush() if self.stream else ""
        if not self.started:
            self.clock.prefilled()
        self.drafted, self.verified, self.round_ms = 0, 0, None
        return self._finish([], text, None, "cancelled", None)

    def _push(self, tokens: list[int]) -> tuple[str, int, str | None]:
        if self.stream is None:
            return "", len(tokens), None
        event = self.stream.push(tokens)
        return event.text, event.num_tokens_used, event.stop

    def _count(self, result: RoundResult, used: int) -> None:
        if self.started:
            self.clock.round(result, used)
        else:
            self.clock.prefilled()
        self.started = True

    def _finish(
        self,
        tokens: list[int],
        text: str,
        logprobs: list[TokenLogprobs] | None,
        finish_reason: str,
        stop_reason: str | int | None,
    ) -> StreamEvent:
        self.text.append(text)
        prompt, completion = len(self.request.prompt), len(self.token_ids)
        output = Output(
            token_ids=self.token_ids,
            text="".join(self.text),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            logprobs=self.logprobs,
            usage=Usage(prompt, completion, prompt + completion, self.cached_tokens),
            timings=self.clock.timings(),
        )
        return StreamEvent(tokens, text, logprobs, finish_reason, output, self.drafted, self.verified, self.round_ms)
