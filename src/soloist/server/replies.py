"""Answers as they leave."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

Finish = Literal["stop", "length", "tool_calls", "cancelled"]


class PromptDetails(Struct):
    cached_tokens: int


class CompletionDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Alternative(Struct):
    """bytes: the token's part of the text, which may be less than a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Alternative):
    top_logprobs: list[Alternative]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]


class CompletionLogprobs(Struct):
    """text_offset counts the characters of the choice's text, with the prompt where it is echoed."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class Function(Struct):
    name: str
    arguments: str


class ToolCall(Struct):
    id: str
    function: Function
    type: Literal["function"] = "function"


class Message(Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: Message
    finish_reason: Finish
    stop_reason: str | int | None
    logprobs: ChatLogprobs | None
    token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Struct):
    index: int
    text: str
    finish_reason: Finish
    stop_reason: str | int | None
    logprobs: CompletionLogprobs | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: dict[str, Any] | UnsetType = UNSET


class Completion(Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None
    timings: dict[str, Any] | UnsetType = UNSET


class ToolFunctionDelta(Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: ToolFunctionDelta | UnsetType = UNSET


class Delta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    stop_reason: str | int | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionChunkChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    stop_reason: str | int | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct):
    """One round of the stream. The chunk of the counts has no choice."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"]
    usage: Usage | None | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    timings: dict[str, Any] | UnsetType = UNSET


class CompletionChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    object: Literal["text_completion"]
    usage: Usage | None | UnsetType = UNSET
    timings: dict[str, Any] | UnsetType = UNSET


class ModelCard(Struct):
    """max_model_len: tokens of prompt and answer together."""

    id: str
    created: int
    max_model_len: int
    meta: dict[str, Any]
    object: Literal["model"] = "model"
    owned_by: str = "soloist"


class ModelList(Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class Tokens(Struct):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(Struct):
    prompt: str


class Aborted(Struct):
    id: str
    aborted: bool = True


class Status(Struct):
    """running, waiting: requests."""

    status: Literal["loading", "ready", "draining", "failed"]
    running: int
    waiting: int


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    error: ErrorDetail
