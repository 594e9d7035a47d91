"""The engine serves one request after another: prefill, then rounds until the request is done."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from soloist.config import SamplingParams
from soloist.drafters.drafter import Drafter, NoDraft
from soloist.drafters.width import FixedWidth, WidthChoice
from soloist.errors import UserError
from soloist.ops.accept import FULL, STOPPED
from soloist.runtime.constraint import Constraint
from soloist.runtime.graph import GraphRunner
from soloist.runtime.prefill import cut_size, prefill, teacher_forced
from soloist.runtime.round import Parts
from soloist.runtime.runner import EagerRunner, RoundResult, Runner, to_host
from soloist.runtime.sampler import Sampler
from soloist.state.prefix import PrefixCache
from soloist.text.grammar import Grammar


@dataclass(frozen=True)
class Request:
    """Prompt ids, the ids that end the request beside params.stop_token_ids, how to sample, and the grammar at its
    beginning that params.response_format asks for.
    """

    prompt: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    params: SamplingParams
    grammar: Grammar | None = None


WARM_ROWS = 33
"""A prompt that is longer than a window, gives experts few rows, and is divisible by nothing."""

FINISH = {STOPPED: "stop", FULL: "length"}


class Engine:
    """One sequence, one request at a time.

    rejection: accept drafts by rejection sampling instead of equality. prefix_cache_bytes: what may be kept of earlier
    prompts beside the sequence itself, 0 for nothing; `prefixes.begun` tells what a request took from there.
    """

    def __init__(
        self,
        parts: Parts,
        vocab_size: int,
        prefill_chunk: int,
        widths: WidthChoice,
        rejection: bool = False,
        prefix_cache_bytes: int = 0,
    ):
        parts.drafter.bind(parts.model, parts.sequence, parts.bufs)
        parts = replace(parts, trims=widths.adapts and parts.drafter.confidence is not None)
        self.parts, self.vocab_size, self.prefill_chunk = parts, vocab_size, prefill_chunk
        self.widths, self.rejection = widths, rejection
        self.runner: Runner = GraphRunner(parts) if parts.sequence.device.type == "cuda" else EagerRunner(parts)
        with torch.inference_mode():
            size = cut_size(parts, prefill_chunk) if prefix_cache_bytes else prefill_chunk
        self.prefixes = PrefixCache(parts.sequence, size, prefix_cache_bytes)

    @property
    def context_length(self) -> int:
        return self.parts.sequence.context_length

    def plain(self) -> Engine:
        """An engine on the same model and state that drafts nothing. Not to run at the same time as this one."""
        return self.drafting(NoDraft(), FixedWidth(0))

    def drafting(self, drafter: Drafter, widths: WidthChoice, rejection: bool = False) -> Engine:
        """As `plain`, with a drafter of its own."""
        return Engine(replace(self.parts, drafter=drafter), self.vocab_size, self.prefill_chunk, widths, rejection)

    def check(self, request: Request) -> int:
        """Refuse what cannot run; returns how many tokens may be generated.

        Raises: UserError for an empty or too long prompt, ids outside the vocabulary.
        """
        self._check_prompt(request.prompt, self.context_length - 1, "leave room for one token")
        for name, ids in (("stop_token_ids", request.params.stop_token_ids), ("logit_bias", request.params.logit_bias)):
            for token in ids or ():
                self._check_id(token, name)
        room = self.context_length - len(request.prompt)
        wanted = request.params.max_tokens
        return room if wanted is None else min(wanted, room)

    def check_text(self, ids: tuple[int, ...]) -> None:
        """Refuse a text that `logits` cannot take.   Raises: UserError."""
        self._check_prompt(ids, self.context_length, "it must fit")

    def _check_prompt(self, prompt: tuple[int, ...], limit: int, reason: str) -> None:
        if not prompt:
            raise UserError("the prompt is empty; give at least one token")
        if len(prompt) > limit:
            raise UserError(
                f"the prompt has {len(prompt)} tokens, the context holds {self.context_length}; {reason}: "
                f"shorten it to {limit} or raise context_length"
            )
        if {*map(type, prompt)} != {int} or min(prompt) < 0 or max(prompt) >= self.vocab_size:
            for token in prompt:
                self._check_id(token, "prompt")

    def _check_id(self, token: int, where: str) -> None:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
            raise UserError(f"{where} holds {token!r}; token ids are whole numbers from 0 to {self.vocab_size - 1}")

    @torch.inference_mode()
    def run(self, request: Request) -> Iterator[RoundResult | None]:
        """Serve a request: first the prefill's token, then one result a round. None = a pass over the prompt is done.

        Closing the iterator ends the request. The last result has `done` set.
        """
        prompt, sampler = self._start(request, self.check(request))
        constraint = None
        if request.grammar is not None:
            constraint = Constraint(request.grammar, self.parts.bufs, len(request.prompt))
        result, begun = None, time.perf_counter()
        for output in prefill(self.parts, sampler, prompt, self.prefill_chunk, self.prefixes):
            result = None if output is None else to_host(output, 0, begun)
            yield result
        assert result is not None
        self.widths.begin(result.confidence)
        if result.running:
            yield from self._rounds(sampler, len(request.prompt), result, constraint)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run prompts and rounds of every width that may be chosen, so that no request pays for what is made at first use.

        Where rounds are captured each width runs twice, once to compile and once to capture, and prompts are as long as it
        takes to compile the kernels of long windows for few and for many rows an expert; on the CPU, where lengths and
        widths do not differ in that, a short prompt and the narrowest and the widest round do.
        """
        widest, captures = self.parts.drafter.width, self.runner.lookahead > 0
        widths = [width for width in self.widths.candidates for _ in range(2)] if captures else [0, widest]
        bound, budget = 1, min(sum(width + 1 for width in widths), self.context_length - 1)
        for length in (self.prefill_chunk, WARM_ROWS, 1) if captures else (1,):
            ids = (0,) * min(length, self.context_length - 1)
            prompt, sampler = self._start(Request(ids, (), SamplingParams(temperature=0)), budget)
            for _ in prefill(self.parts, sampler, prompt, self.prefill_chunk, self.prefixes):
                pass
        for width in widths:
            bound = min(bound + width + 1, self.context_length + self.parts.sequence.max_window)
            self.runner.launch(sampler, bound, width)
            self.runner.read()

    def _start(self, request: Request, budget: int) -> tuple[torch.Tensor, Sampler]:
        """Forget the last request and make ready for this one: its prompt on the device, its sampler."""
        params, parts = request.params, self.parts
        prompt = self._tensor(request.prompt)
        eos = () if params.ignore_eos else request.eos_token_ids
        seed = secrets.randbits(63) if params.seed is None else params.seed
        self.prefixes.begin(request.prompt, parts.model.variant(len(request.prompt)))
        parts.bufs.start(prompt, budget, tuple(eos) + tuple(params.stop_token_ids), seed)
        parts.drafter.reset()
        self.runner.drop()
        return prompt, Sampler(params, parts.bufs, self.rejection)

    def _rounds(
        self, sampler: Sampler, committed: int, result: RoundResult, constraint: Constraint | None
    ) -> Iterator[RoundResult]:
        """Launch ahead as far as the runner allows, read the oldest, until one is done.

        A grammar must have read the last round's tokens before it can follow the next.
        """
        limit = self.context_length + self.parts.sequence.max_window
        lookahead = self.runner.lookahead if constraint is None else 0
        in_flight: deque[int] = deque()
        while result.running:
            if constraint is not None:
                constraint.take(result.tokens)
            while len(in_flight) <= lookahead:
                width = self.widths.choose(constraint.num_forced if constraint else 0)
                if (told := self.widths.tell()) is not None:
                    self.parts.bufs.tell(*told)
                in_flight.append(width + 1)
                bound = min(committed + sum(in_flight), limit)
                self.runner.launch(sampler, bound, width, constraint.follow if constraint else None)
            result = self.runner.read()
            in_flight.popleft()
            committed += len(result.tokens)
            self.widths.learn(
                result.drafted, result.verified, len(result.tokens), result.running, result.ms, result.confidence
            )
            yield result

    @torch.inference_mode()
    def logits(self, ids: tuple[int, ...]) -> torch.Tensor:
        """Teacher-forced logits [T, V] fp32, on the device."""
        self.check_text(ids)
        self.parts.sequence.reset(len(ids))
        return teacher_forced(self.parts, self._tensor(ids), self.prefill_chunk)

    def _tensor(self, ids: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.parts.bufs.anchor.device)
