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
from soloist.server.replies import (
    ChatChoice,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    Finish,
    Function,
    Message,
    ToolCall,
    ToolCallDelta,
    ToolFunctionDelta,
)
from soloist.text.answer import AnswerDelta, AnswerParser
from soloist.text.reasoning import Reasoning, count_reasoning
from soloist.text.tokenizer import Tokenizer
from soloist.text.tools.calls import CallDelta

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
    """The assistant's message. parser: takes its text apart; reasoning: how the answer begins."""

    def __init__(self, tokenizer: Tokenizer, parser: AnswerParser, reasoning: Reasoning, return_ids: bool):
        self._tokenizer, self._parser, self._reasoning, self._return_ids = tokenizer, parser, reasoning, return_ids
        self._begun = False
        self.reasoning_tokens = 0

    def piece(self, event: StreamEvent) -> bytes:
        delta = _delta(self._read(event.text, event.output))
        if not self._begun:
            self._begun, delta.role = True, "assistant"
        logprobs = b"null" if event.logprobs is None else encode(chat_logprobs(self._tokenizer, event.logprobs))
        return b'"delta":%b,"logprobs":%b' % (encode(delta), logprobs)

    def finish(self, output: Output) -> Finish:
        """A text that ended by itself with calls waits for their results."""
        called = self._parser.called and output.finish_reason == "stop"
        return "tool_calls" if called else output.finish_reason  # type: ignore[return-value]

    def whole(self, index: int, output: Output) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=_message(self._read(output.text, output)),
            finish_reason=self.finish(output),
            stop_reason=output.stop_reason,
            logprobs=None if output.logprobs is None else chat_logprobs(self._tokenizer, output.logprobs),
            token_ids=output.token_ids if self._return_ids else UNSET,
        )

    def _read(self, text: str, output: Output | None) -> AnswerDelta:
        """What the text brought; with the output, all that was held back."""
        came = self._parser.push(text)
        if output is None:
            return came
        if self._reasoning is not Reasoning.NONE:
            self.reasoning_tokens = count_reasoning(self._tokenizer, output.token_ids, self._reasoning)
        rest = self._parser.flush()
        return AnswerDelta(came.reasoning + rest.reasoning, came.content + rest.content, came.calls + rest.calls)


def _delta(came: AnswerDelta) -> Delta:
    """Something is always said, so that every round has its chunk."""
    delta = Delta()
    if came.reasoning:
        delta.reasoning_content = came.reasoning
    if came.calls:
        delta.tool_calls = [_call_delta(call) for call in came.calls]
    if came.content or not came:
        delta.content = came.content
    return delta


def _call_delta(call: CallDelta) -> ToolCallDelta:
    if call.name is None or call.id is None:
        return ToolCallDelta(call.index, function=ToolFunctionDelta(arguments=call.arguments))
    return ToolCallDelta(call.index, call.id, "function", ToolFunctionDelta(call.name, call.arguments))


def _message(came: AnswerDelta) -> Message:
    calls: dict[int, ToolCall] = {}
    for call in came.calls:
        if call.index not in calls:
            calls[call.index] = ToolCall(call.id or "", Function(call.name or "", ""))
        calls[call.index].function.arguments += call.arguments
    message = Message(came.content if came.content or not calls else None)
    if came.reasoning:
        message.reasoning_content = came.reasoning
    if calls:
        message.tool_calls = list(calls.values())
    return message


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
