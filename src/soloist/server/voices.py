"""One choice of an answer: what it says in the shape of its endpoint, round by round or as a whole.

The whole is what the rounds' pieces add up to, so a stream and its answer cannot differ.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
from msgspec import UNSET

from soloist.llm import Output, StreamEvent
from soloist.server.answers import CompletionTokens, chat_logprobs
from soloist.server.prepare import Prompt
from soloist.server.replies import ChatChoice, CompletionChoice, CompletionLogprobs, Delta, Finish, Message
from soloist.text.tokenizer import Tokenizer

encode = msgspec.json.Encoder().encode


class Voice(Protocol):
    """reasoning_tokens: how many of the tokens so far were thought and not said."""

    reasoning_tokens: int

    def piece(self, event: StreamEvent) -> bytes:
        """The members of a chunk's choice that say what came: text or delta, and logprobs."""
        ...

    def finish(self, output: Output) -> Finish:
        """Why it ended."""
        ...

    def whole(self, index: int, output: Output) -> ChatChoice | CompletionChoice:
        """The finished choice, from an output of which no piece was taken."""
        ...


class ChatVoice:
    """The assistant's message."""

    def __init__(self, tokenizer: Tokenizer, return_ids: bool):
        self._tokenizer, self._return_ids = tokenizer, return_ids
        self._begun = False
        self.reasoning_tokens = 0

    def piece(self, event: StreamEvent) -> bytes:
        delta = Delta(content=event.text)
        if not self._begun:
            self._begun, delta.role = True, "assistant"
        logprobs = b"null" if event.logprobs is None else encode(chat_logprobs(self._tokenizer, event.logprobs))
        return b'"delta":%b,"logprobs":%b' % (encode(delta), logprobs)

    def finish(self, output: Output) -> Finish:
        return output.finish_reason  # type: ignore[return-value]

    def whole(self, index: int, output: Output) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=Message(output.text),
            finish_reason=self.finish(output),
            stop_reason=output.stop_reason,
            logprobs=None if output.logprobs is None else chat_logprobs(self._tokenizer, output.logprobs),
            token_ids=output.token_ids if self._return_ids else UNSET,
        )


class CompletionVoice:
    """The continued text. alternatives: how many logprobs beside each token's own."""

    reasoning_tokens = 0

    def __init__(self, tokenizer: Tokenizer | None, prompt: Prompt, alternatives: int, return_ids: bool):
        self._prompt, self._alternatives, self._return_ids = prompt, alternatives, return_ids
        self._tokens = CompletionTokens(tokenizer, len(prompt.text))
        self._begun = False

    def piece(self, event: StreamEvent) -> bytes:
        text = event.text if self._begun else self._prompt.text + event.text
        own = b'"text":%b,"logprobs":%b' % (encode(text), encode(self._logprobs(event)))
        if self._return_ids and not self._begun:
            own += b',"prompt_token_ids":' + encode(self._prompt.ids)
        self._begun = True
        return own

    def finish(self, output: Output) -> Finish:
        return output.finish_reason  # type: ignore[return-value]

    def whole(self, index: int, output: Output) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=self._prompt.text + output.text,
            finish_reason=self.finish(output),
            stop_reason=output.stop_reason,
            logprobs=self._logprobs(output),
            token_ids=output.token_ids if self._return_ids else UNSET,
            prompt_token_ids=self._prompt.ids if self._return_ids else UNSET,
        )

    def _logprobs(self, came: StreamEvent | Output) -> CompletionLogprobs | None:
        return None if came.logprobs is None else self._tokens.take(came.logprobs, self._alternatives)
