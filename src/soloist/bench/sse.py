"""From the packets of a streamed answer to events: what an OpenAI-compatible server said, and when it came.

A packet is parsed after the request has ended, so that the client does nothing between two reads. All events that one
packet completes carry its time; a client cannot know better. Tokens are counted by what the server says, never by chunks:

    token ids     `token_ids` of a choice (return_token_ids)
    usage         `usage` in every chunk (continuous_usage_stats), or once at the end
    timings       `predicted_n` in every chunk (timings_per_token of llama-server), with its clock and its drafts
    agreement     one token a chunk, where a second witness says so

Sources: OpenAI API reference (streaming of both endpoints); vLLM, SGLang and llama-server documentation of the fields above.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from soloist.bench.target import Ending, Event

DONE = "[DONE]"

Packet = tuple[float, bytes]
"""Milliseconds since the request was sent, and the body's bytes that one read brought."""


def messages(packets: Sequence[Packet]) -> Iterator[tuple[float, str]]:
    """The `data` of every server-sent event, and when its last byte came."""
    rest = b""
    for t_ms, data in packets:
        *lines, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield t_ms, line.removeprefix(b"data:").strip().decode("utf-8", "replace")
    if rest.startswith(b"data:") and packets:  # a server that ends without its last line end
        yield packets[-1][0], rest.removeprefix(b"data:").strip().decode("utf-8", "replace")


def read_answer(
    packets: Sequence[Packet], max_tokens: int | None = None, count_text: Callable[[str], int] | None = None
) -> list[Event]:
    """The events of a whole answer; the last carries the ending, with `error` where the answer is not complete.

    max_tokens, count_text (tokens of a text, by the model's tokenizer): see `_agreed`.
    """
    answer = _Answer(max_tokens=max_tokens, count_text=count_text)
    for t_ms, data in messages(packets):
        answer.end_ms = t_ms
        if data == DONE:
            answer.done = True
            break
        if not answer.take(t_ms, data):
            break
    return answer.finish(packets[-1][0] if packets else 0.0)


@dataclass
class _Answer:
    """What the server has said so far. tokens, drafted, accepted: its running counts."""

    max_tokens: int | None = None
    count_text: Callable[[str], int] | None = None
    events: list[Event] = field(default_factory=list)
    end_ms: float | None = None
    done: bool = False
    finish_reason: str | None = None
    error: str | None = None
    usage: dict[str, Any] | None = None
    tokens: int | None = None
    ids: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    cached: int | None = None

    def take(self, t_ms: float, data: str) -> bool:
        """Account for one message. False: nothing after it can be trusted."""
        try:
            chunk = json.loads(data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            self.error = f"the stream holds what is no JSON object: {data[:80]!r}"
        elif chunk.get("error"):
            self.error = f"the server reported: {error_text(chunk)}"
        else:
            self._chunk(t_ms, chunk)
        return self.error is None

    def _chunk(self, t_ms: float, chunk: dict[str, Any]) -> None:
        choice = (chunk.get("choices") or [{}])[0]  # the usage chunk has an empty list
        ids = choice.get("token_ids")
        timings = chunk.get("timings") or {}
        count = self._count(ids, chunk.get("usage"), timings)
        thought, text = texts(choice)
        base = Event(
            t_ms,
            token_ids=None if ids is None else tuple(ids),
            n=count,
            drafted=self._rise("drafted", timings.get("draft_n")),
            accepted=self._rise("accepted", timings.get("draft_n_accepted")),
            server_ms=timings["prompt_ms"] + timings["predicted_ms"] if {"prompt_ms", "predicted_ms"} <= set(timings) else None,
        )
        if thought:
            self.events.append(replace(base, text=thought, reasoning=True))
        if thought and text:  # one chunk ends the thought and begins the answer; its tokens are counted once
            self.events.append(Event(t_ms, n=None if count is None else 0, text=text))
        elif text or (count and not thought):
            self.events.append(replace(base, text=text))
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _count(self, ids: list[int] | None, usage: dict[str, Any] | None, timings: dict[str, Any]) -> int | None:
        """Tokens of this chunk, None where the server does not tell."""
        if usage:
            self.usage = usage
            self.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", self.cached)
        self.cached = timings.get("cache_n", self.cached)
        total = usage.get("completion_tokens") if usage else timings.get("predicted_n")
        by_total = self._rise("tokens", total)
        if ids is not None:
            self.ids = (self.ids or 0) + len(ids)
            return len(ids)
        told_later = self.ids is not None or (self.events and self.events[-1].n is None)
        return None if told_later else by_total  # a sum over earlier chunks says nothing of this one

    def _rise(self, name: str, total: int | None) -> int | None:
        """How much a running count grew with this chunk."""
        if total is None:
            return None
        before = getattr(self, name) or 0
        setattr(self, name, total)
        return int(total) - before

    def finish(self, last_ms: float) -> list[Event]:
        if self.error is None and not self.done and self.finish_reason is None:
            self.error = "the connection ended before the answer did"
        total, source = self.tokens, None if self.tokens is None else "usage"
        if self.ids is not None and total in (None, self.ids):
            total, source = self.ids, "token ids"
        if total is None and (agreed := self._agreed()):
            total, source = len(self.events), agreed
        ending = Ending(
            finish_reason=self.finish_reason,
            prompt_tokens=None if self.usage is None else self.usage.get("prompt_tokens"),
            output_tokens=total,
            count_source=source,
            cached_tokens=self.cached,
            error=self.error,
        )
        return [*spread_total(self.events, ending), Event(last_ms if self.end_ms is None else self.end_ms, ending=ending)]

    def _agreed(self) -> str | None:
        """Where a server gives no count: what agrees with the number of chunks, none of which holds less than a token.

        That is the limit, if the answer ended at it, or the tokenizer's count of the text. Without such a second
        witness there is no count: a chunk may hold several tokens.
        """
        chunks = len(self.events)
        if self.error is not None or not chunks:
            return None
        if self.finish_reason == "length" and chunks == self.max_tokens:
            return "chunks = limit"
        text = "".join(event.text for event in self.events)
        return "chunks = tokenizer" if self.count_text is not None and self.count_text(text) == chunks else None


def texts(choice: dict[str, Any]) -> tuple[str, str]:
    """Thought and answer in one choice of either endpoint."""
    delta = choice.get("delta") or {}
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return thought, delta.get("content") or choice.get("text") or ""


def spread_total(events: list[Event], ending: Ending) -> list[Event]:
    """Give every event its count where only the sum is known and leaves no choice.

    An event holds a token or more, so as many events as tokens means one each. An answer that ended by itself has one
    token more, the unseen end of text.
    """
    unseen = 1 if ending.finish_reason == "stop" else 0
    if any(e.n is not None for e in events) or ending.output_tokens not in (len(events), len(events) + unseen):
        return events
    return [replace(e, n=1) for e in events]


def error_text(body: dict[str, Any]) -> str:
    """The message of an error in OpenAI's shape, or in one of the others that servers use."""
    error = body.get("error") or body.get("detail") or body.get("message") or body
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:300]
