"""The two endpoints that generate: from a request's body to the last byte of its answer."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from threading import Event
from typing import Any

import msgspec
from msgspec import UNSET

from soloist.llm import LLM, Output
from soloist.server.answers import Counts, final_timings
from soloist.server.chunks import Chunks, Head
from soloist.server.exchange import SSE, Disconnected, Exchange
from soloist.server.faults import Fault
from soloist.server.log import log
from soloist.server.metrics import Metrics
from soloist.server.prepare import Work, prepare_chat, prepare_completion, tokenizer_of
from soloist.server.replies import ChatCompletion, Completion
from soloist.server.settings import ServerSettings
from soloist.server.voices import ChatVoice, CompletionVoice, Voice, encode
from soloist.server.wire import ChatRequest, CompletionRequest, Sampling
from soloist.server.worker import Job, Round, Worker, cut_off

_ID = re.compile(r"[!-~]{1,128}")


class Generation:
    """One request that generates. job: to be cancelled by whoever has a reason."""

    def __init__(
        self, exchange: Exchange, worker: Worker, settings: ServerSettings, metrics: Metrics, text: ThreadPoolExecutor
    ):
        self._exchange, self._worker, self._settings, self._metrics = exchange, worker, settings, metrics
        self._text = text
        self._is_chat = exchange.path.endswith("/chat/completions")
        self.job = Job(request_id(exchange, "chatcmpl-" if self._is_chat else "cmpl-"))
        self._outputs: dict[int, Output] = {}
        self._counts = Counts()
        self._first: float | None = None
        exchange.headers.append(("x-request-id", self.job.id))

    async def run(self, request: ChatRequest | CompletionRequest, model: str) -> None:
        """Raises: Fault, UserError; Disconnected where nobody waits for the answer."""
        job = self.job
        job.streamed = bool(request.stream)
        llm = self._worker.llm
        prepare: Callable[[LLM, Any, Event], Work] = prepare_chat if self._is_chat else prepare_completion
        work = await asyncio.get_running_loop().run_in_executor(self._text, prepare, llm, request, job.cancelled)
        self._raise_if_gone()
        job.streams = work.streams
        voices = self._voices(llm, request, work)
        head = Head(job.id, "chat.completion" if self._is_chat else "text_completion", int(time.time()), model)
        self._worker.submit(job)
        timer = self._start_timer()
        try:
            await (self._stream if request.stream else self._answer)(request, work, voices, head)
        finally:
            if timer is not None:
                timer.cancel()
            self._book(request, work)

    def _start_timer(self) -> asyncio.TimerHandle | None:
        limit = self._settings.request_timeout
        return asyncio.get_running_loop().call_later(limit, self._worker.cancel, self.job, "timeout") if limit else None

    def _voices(self, llm: LLM, request: ChatRequest | CompletionRequest, work: Work) -> list[Voice]:
        ids = bool(request.return_token_ids)
        if isinstance(request, ChatRequest):
            tokenizer = tokenizer_of(llm, "messages")
            return [ChatVoice(tokenizer, work.parser(), work.reasoning, ids) for _ in work.prompts]
        return [CompletionVoice(llm.tokenizer, prompt, request.logprobs or 0, ids) for prompt in work.prompts]

    async def _stream(self, request: Sampling, work: Work, voices: list[Voice], head: Head) -> None:
        """The headers wait for the first round, so that a request that fails before it has a proper status."""
        exchange, chunks = self._exchange, None
        async for one in self.job.rounds():
            self._take(one, work, voices)
            if chunks is None:
                await exchange.start(200, SSE, [self._queue_header(), ("cache-control", "no-cache")])
                head = Head(head.id, "chat.completion.chunk" if self._is_chat else head.object, head.created, head.model)
                queue_ms, started = self.job.queue_ms, self.job.started or one.at
                chunks = Chunks(
                    head, request, voices, work.prompts, self._counts, queue_ms, started, prompt_ids=self._is_chat
                )
            await exchange.send(chunks.chunk(one))
            self._counts.reasoning = sum(voice.reasoning_tokens for voice in voices)
        if chunks is None:
            raise cut_off(self.job.reason or "abort")
        await exchange.send(chunks.end(), more=False)

    async def _answer(self, request: Sampling, work: Work, voices: list[Voice], head: Head) -> None:
        async for one in self.job.rounds():
            self._take(one, work, voices)
        if not self._outputs:
            raise cut_off(self.job.reason or "abort")
        choices: list[Any] = [voices[index].whole(index, output) for index, output in self._outputs.items()]
        self._counts.reasoning = sum(voice.reasoning_tokens for voice in voices)
        timings: Any = UNSET
        if request.timings or request.timings_per_token:
            timings = final_timings(self.job.queue_ms, self._outputs[0])
        usage = self._counts.usage()
        answer: ChatCompletion | Completion = Completion(head.id, head.created, head.model, choices, usage, timings=timings)
        if self._is_chat:
            ids = work.prompts[0].ids if request.return_token_ids else UNSET
            answer = ChatCompletion(
                head.id, head.created, head.model, choices, usage, prompt_token_ids=ids, timings=timings
            )
        await self._exchange.reply(encode(answer), more=dict([self._queue_header()]))

    def _take(self, one: Round, work: Work, voices: list[Voice]) -> None:
        """Count a round.   Raises: Fault where it says that the request was cut off; Disconnected."""
        event, counts = one.event, self._counts
        self._raise_if_gone()
        if event.finish_reason == "cancelled" and self.job.reason in ("timeout", "shutdown"):
            raise cut_off(self.job.reason)
        if self._first is None:
            self._first = one.at
            counts.prompt = sum(len(ids) for ids in {id(prompt): prompt.ids for prompt in work.prompts}.values())
        if event.output is None:
            counts.completion += len(event.token_ids)
            return
        before = sum(output.usage.completion_tokens for output in self._outputs.values())
        if all(work.prompts[other] is not work.prompts[one.choice] for other in self._outputs):
            counts.cached += event.output.usage.cached_tokens
        self._outputs[one.choice] = event.output
        counts.completion = before + event.output.usage.completion_tokens

    def _raise_if_gone(self) -> None:
        if self.job.reason == "disconnect":
            raise Disconnected

    def _queue_header(self) -> tuple[str, str]:
        return "server-timing", f"queue;dur={self.job.queue_ms:.1f}"

    def _book(self, request: Sampling, work: Work) -> None:
        """Metrics and the log's line."""
        job, metrics, now = self.job, self._metrics, time.perf_counter()
        outputs = list(self._outputs.values())
        if job.reason is not None:
            metrics.cancelled.add(1, job.reason)
        if job.started is not None:
            metrics.queue.observe(job.queue_ms / 1e3)
            metrics.total.observe(now - job.arrived)
        metrics.prompt.add(self._counts.prompt)
        metrics.cached.add(self._counts.cached)
        metrics.generated.add(self._counts.completion)
        for output in outputs:
            times = output.timings
            metrics.finished.add(1, output.finish_reason)
            metrics.rounds.add(times.rounds)
            metrics.drafted.add(times.drafted)
            emitted = sum(k * count for k, count in enumerate(times.accepted_histogram))
            metrics.accepted.add(emitted - times.rounds if times.drafted else 0)
            metrics.ttft.observe(times.ttft_ms / 1e3)
            metrics.tpot.observe(None if times.tpot_ms is None else times.tpot_ms / 1e3)
            metrics.acceptance.observe(times.acceptance_length)
        first = outputs[0].timings if outputs else None
        log(
            "request",
            id=job.id, path=self._exchange.path, client=self._exchange.client, stream=job.streamed,
            prompt_tokens=self._counts.prompt, completion_tokens=self._counts.completion,
            finish=[output.finish_reason for output in outputs], cancelled=job.reason,
            queue_ms=_short(job.queue_ms), total_ms=_short((now - job.arrived) * 1e3),
            ttft_ms=first and _short(first.ttft_ms), tpot_ms=first and _short(first.tpot_ms),
            acceptance_length=first and _short(first.acceptance_length),
            request=msgspec.to_builtins(request) if self._settings.log_text else None,
            text=[output.text for output in outputs] if self._settings.log_text else None,
        )  # fmt: skip


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def request_id(exchange: Exchange, prefix: str) -> str:
    """The client's own, from the header x-request-id, or a new one."""
    given = exchange.asked.get("x-request-id")
    if given is None:
        return prefix + secrets.token_hex(12)
    if not _ID.fullmatch(given):
        raise Fault(400, "the header x-request-id holds 1 to 128 printable ASCII characters without spaces", "x-request-id")
    return given


def plan_meta(llm: LLM) -> dict[str, Any]:
    """What a model's card says beside its context length."""
    plan = asdict(llm.plan)
    names = "architecture num_parameters dtype device device_name drafter draft_width acceptance prefill_chunk ranks"
    return {name: plan[name] for name in names.split()}
