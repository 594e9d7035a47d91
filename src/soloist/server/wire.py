"""Requests as they arrive. A field that is not here is refused by name; null means the same as absence."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

MAX_CHOICES = 16

Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=0, le=1 << 31)]
TokenId = Annotated[int, Meta(ge=0, le=1 << 31)]
Text = Annotated[str, Meta(min_length=1)]
Messages = Annotated[
    list[dict[str, Any]],
    Meta(
        min_length=1,
        description="As OpenAI's. Of the parts of a content, text only. Other keys go to the model's chat template.",
        extra_json_schema={"items": {"type": "object", "required": ["role"], "properties": {"role": {"type": "string"}}}},
    ),
]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """include_usage: a last chunk with the counts; continuous_usage_stats: counts so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampling(Struct, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints take.

    `timings` adds an object of that name to the answer: times, rounds, acceptance. `timings_per_token` adds running
    counts to every chunk. `user`, `metadata` and `prompt_cache_key` are for the client's own books.
    """

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=1000)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    min_tokens: Count | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[Annotated[int, Meta(ge=0, le=1 << 31)], Annotated[float, Meta(ge=-100, le=100)]] | None = None
    response_format: dict[str, Any] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES, description="Run one after the other; seed + 1 for each.")] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    timings: bool | None = None
    timings_per_token: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None


class ChatRequest(Sampling, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None


class CompletionRequest(Sampling, kw_only=True):
    """POST /v1/completions. prompt: one text or list of token ids, or a list of several."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES, description="Supported where it equals n.")] | None = None


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /tokenize. One of prompt and messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None


class AbortRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/abort. id: as in the answer's chunks, or as the client set it in the header x-request-id."""

    id: Text
