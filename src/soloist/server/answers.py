"""The parts of an answer that streams and whole answers share: logprobs, counts, times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from soloist.llm import Output, StreamEvent
from soloist.runtime.runner import TokenLogprobs
from soloist.server.replies import (
    Alternative,
    ChatLogprobs,
    CompletionDetails,
    CompletionLogprobs,
    PromptDetails,
    TokenLogprob,
    Usage,
)
from soloist.text.tokenizer import Tokenizer


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs]) -> ChatLogprobs:
    return ChatLogprobs([_chat_token(tokenizer, one) for one in tokens])


def _chat_token(tokenizer: Tokenizer, one: TokenLogprobs) -> TokenLogprob:
    top = [Alternative(*_named(tokenizer, token, value)) for token, value in one.top.items()]
    name, value, data = _named(tokenizer, one.token_id, one.logprob)
    return TokenLogprob(name, value, data, top)


def _named(tokenizer: Tokenizer, token: int, logprob: float) -> tuple[str, float, list[int]]:
    data = tokenizer.token_bytes(token)
    return data.decode(errors="replace"), finite(logprob), list(data)


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI's own API says -9999 for what cannot be."""
    return max(logprob, -9999.0)


class CompletionTokens:
    """Logprobs of a continued text, round by round. start: characters before it."""

    def __init__(self, tokenizer: Tokenizer | None, start: int = 0):
        self._tokenizer = tokenizer
        self._detokenizer = None if tokenizer is None else tokenizer.detokenizer()
        self._offset = start

    def take(self, tokens: Sequence[TokenLogprobs], alternatives: int) -> CompletionLogprobs:
        offsets = []
        for one in tokens:
            offsets.append(self._offset)
            if self._detokenizer is not None:
                self._offset += len(self._detokenizer.push(one.token_id))
        return CompletionLogprobs(
            tokens=[self._name(one.token_id) for one in tokens],
            token_logprobs=[finite(one.logprob) for one in tokens],
            top_logprobs=[self._top(one) for one in tokens] if alternatives else None,
            text_offset=offsets,
        )

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        return {self._name(token): finite(value) for token, value in one.top.items()}

    def _name(self, token: int) -> str:
        """The token's text; its bytes where they are no text by themselves, so that two tokens have two names."""
        if self._tokenizer is None:
            return f"token_id:{token}"
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Counts:
    """Running counts of a request's choices."""

    def __init__(self) -> None:
        self.prompt = self.cached = self.completion = self.reasoning = 0

    def usage(self) -> Usage:
        return Usage(
            self.prompt,
            self.completion,
            self.prompt + self.completion,
            PromptDetails(self.cached),
            CompletionDetails(self.reasoning),
        )


class Clock:
    """Times and drafts of one choice while it runs, with the names that llama.cpp's server has for them.

    started: perf_counter at the choice's turn; queue_ms: how long it had waited for it.
    """

    def __init__(self, started: float, queue_ms: float, prompt_tokens: int):
        self._started, self._queue_ms, self._prompt = started, queue_ms, prompt_tokens
        self._first: float | None = None
        self._tokens = self._drafted = self._accepted = 0

    def take(self, event: StreamEvent, at: float) -> dict[str, Any]:
        """Account for a round; returns what is known so far."""
        if self._first is None:
            self._first = at
        elif event.token_ids:
            self._accepted += min(len(event.token_ids) - 1, event.drafted)
        self._drafted += event.drafted
        self._tokens += len(event.token_ids)
        return {
            "queue_ms": self._queue_ms,
            "prompt_n": self._prompt,
            "prompt_ms": (self._first - self._started) * 1e3,
            "predicted_n": self._tokens,
            "predicted_ms": (at - self._first) * 1e3,
            "draft_n": self._drafted,
            "draft_n_accepted": self._accepted,
        }


def final_timings(queue_ms: float, output: Output) -> dict[str, Any]:
    return {"queue_ms": queue_ms, **asdict(output.timings)}
