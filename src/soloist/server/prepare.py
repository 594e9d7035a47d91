"""From a request to what the engine runs: prompts as token ids, parameters, one stream for each choice.

It runs beside the event loop, since tokenising takes time, and before the answer begins: what cannot be served is a 400.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import Any

from soloist.config import SamplingParams
from soloist.errors import UserError
from soloist.llm import LLM, StreamEvent
from soloist.server.faults import Fault, of_user_error
from soloist.server.wire import ChatRequest, CompletionRequest, Messages, Sampling, TokenizeRequest
from soloist.text.answer import AnswerParser
from soloist.text.reasoning import Reasoning, reasoning_of
from soloist.text.tokenizer import Tokenizer
from soloist.text.tools.calls import ToolCalls
from soloist.text.tools.choice import read_choice, tool_grammar
from soloist.text.tools.formats import ToolFormat, tool_calls, tool_format

SHARED = (
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed max_tokens min_tokens stop "
    "stop_token_ids ignore_eos logit_bias response_format"
).split()
"""Fields with the names and meanings of SamplingParams."""

CHAT_NAMES = {"prompt": "messages", "logprobs": "top_logprobs", "logit_bias token": "logit_bias"}
COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens where a text is continued."""

_RENDERED = ("messages", "tools", "add_generation_prompt", "documents")
"""Names in a template that are not for chat_template_kwargs."""


@dataclass(frozen=True)
class Prompt:
    """ids: what the model reads; text: what `echo` puts before the answer."""

    ids: list[int]
    text: str = ""


@dataclass(frozen=True)
class Work:
    """prompts: one for each choice. streams: the same, to be run in turn. parser: takes a chat's answer apart; reasoning:
    how it begins.
    """

    prompts: list[Prompt]
    streams: list[Iterator[StreamEvent]]
    parser: Callable[[], AnswerParser] = AnswerParser
    reasoning: Reasoning = Reasoning.NONE


def prepare_chat(llm: LLM, request: ChatRequest, cancelled: Event) -> Work:
    """Raises: Fault 400."""
    if request.top_logprobs is not None and not request.logprobs:
        raise Fault(400, "top_logprobs needs logprobs to be true", "top_logprobs")
    limit = request.max_completion_tokens
    if limit is not None and request.max_tokens not in (None, limit):
        raise Fault(400, "max_tokens and max_completion_tokens differ; give one", "max_completion_tokens")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    params = _params(request, logprobs, limit or request.max_tokens, CHAT_NAMES)
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    tokenizer, tools = tokenizer_of(llm, "messages"), _tools(request)
    ids = render(llm, request.messages, variables, tools)
    reasoning = reasoning_of(tokenizer, ids)
    calls = None
    if tools:
        known = _tool_format(llm, tokenizer)
        calls = partial(tool_calls, known, tools)
        params = _promised(params, request, known)
    work = _work(llm, request, [Prompt(ids)], params, cancelled, CHAT_NAMES)
    return replace(work, parser=partial(_parser, reasoning, calls), reasoning=reasoning)


def _tools(request: ChatRequest) -> list[dict[str, Any]]:
    """The tools that the model is told of.   Raises: Fault 400."""
    try:
        choice = read_choice(request.tool_choice, request.tools or [])
    except UserError as error:
        raise of_user_error(error, {}) from error
    return [] if choice == "none" else request.tools or []


def _promised(params: SamplingParams, request: ChatRequest, format: ToolFormat) -> SamplingParams:
    """With the grammar of what tool_choice, strict tools and parallel_tool_calls promise.   Raises: Fault 400."""
    if params.constrained:
        text = "response_format leaves no room for tool calls; remove it, or set tool_choice to none"
        raise Fault(400, text, "response_format")
    tools = request.tools or []
    choice = read_choice(request.tool_choice, tools)
    grammar = tool_grammar(format, tools, choice, request.parallel_tool_calls is not False)
    try:
        return params if grammar is None else replace(params, response_format=grammar)
    except UserError as error:
        raise of_user_error(error, {}) from error


def _tool_format(llm: LLM, tokenizer: Tokenizer) -> ToolFormat:
    try:
        return tool_format(tokenizer.chat_template, llm.plan.model)
    except UserError as error:
        raise of_user_error(error, {}) from error


def _parser(reasoning: Reasoning, calls: Callable[[], ToolCalls] | None) -> AnswerParser:
    return AnswerParser(reasoning, None if calls is None else calls())


def prepare_completion(llm: LLM, request: CompletionRequest, cancelled: Event) -> Work:
    """Raises: Fault 400."""
    if request.best_of not in (None, request.n or 1):
        raise Fault(400, "best_of is supported only where it equals n: all answers are returned", "best_of")
    if request.echo and request.logprobs is not None:
        raise Fault(400, "echo together with logprobs is not supported; ask for one of them", "echo")
    limit = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    params = _params(request, request.logprobs, limit, {})
    prompts = [_prompt(llm, one, bool(request.echo)) for one in _each(request.prompt)]
    return _work(llm, request, prompts, params, cancelled, {})


def _params(request: Sampling, logprobs: int | None, max_tokens: int | None, names: dict[str, str]) -> SamplingParams:
    given = {name: value for name in SHARED if (value := getattr(request, name)) is not None}
    if request.stream_options is not None and not request.stream:
        raise Fault(400, "stream_options needs stream to be true", "stream_options")
    try:
        return SamplingParams(**{**given, "logprobs": logprobs, "max_tokens": max_tokens})
    except UserError as error:
        raise of_user_error(error, names) from error


def _work(
    llm: LLM, request: Sampling, prompts: list[Prompt], params: SamplingParams, cancelled: Event, names: dict[str, str]
) -> Work:
    """n choices of every prompt. With a seed, each has its own: seed, seed + 1, ..."""
    choices = request.n or 1
    repeated = [prompt for prompt in prompts for _ in range(choices)]
    if len(repeated) > 1 and (request.timings or request.timings_per_token):
        raise Fault(400, "timings are those of one answer; ask for one", "timings")
    streams = []
    try:
        for index, prompt in enumerate(repeated):
            own = params
            if params.seed is not None and choices > 1:
                own = replace(params, seed=(params.seed + index % choices + (1 << 63)) % (1 << 64) - (1 << 63))
            streams.append(llm.stream(prompt.ids, own, cancelled))
    except UserError as error:
        raise of_user_error(error, names) from error
    return Work(repeated, streams)


def _each(prompt: str | list[Any]) -> list[str | list[int]]:
    """The prompts of a completion request, which may be one or several, as text or ids."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if not prompt or kinds == {int}:
        return [prompt]
    if len(kinds) > 1:
        raise Fault(400, "prompt mixes texts and token ids; give a text, a list of ids, or a list of either", "prompt")
    if len(prompt) > 16:
        raise Fault(400, f"prompt holds {len(prompt)} prompts; 16 at most run one after the other", "prompt")
    return prompt


def _prompt(llm: LLM, prompt: str | list[int], echo: bool) -> Prompt:
    try:
        ids = llm.encode(prompt)
    except UserError as error:
        raise of_user_error(error, {"text": "prompt"}) from error
    if not echo:
        return Prompt(ids)
    if isinstance(prompt, str):
        return Prompt(ids, prompt)
    return Prompt(ids, tokenizer_of(llm, "echo").decode(ids))


def render(
    llm: LLM,
    messages: Messages,
    variables: dict[str, Any],
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Token ids of a conversation.   Raises: Fault 400, also for a variable that the template does not read."""
    tokenizer = tokenizer_of(llm, "messages")
    try:
        for name in variables:
            if name in _RENDERED or name not in tokenizer.template_variables:
                text = f"the model's chat template takes no {name!r}"
                raise Fault(400, text, name if name == "reasoning_effort" else "chat_template_kwargs")
        text = tokenizer.render_chat(messages, add_generation_prompt, tools, **variables)
        return tokenizer.encode(text, add_special=False)
    except UserError as error:
        raise of_user_error(error, {"text": "messages"}) from error


def tokenizer_of(llm: LLM, param: str) -> Tokenizer:
    """Raises: Fault 400 where the model has none."""
    if llm.tokenizer is None:
        raise Fault(400, f"{llm.plan.model} has no tokenizer; give the prompt of /v1/completions as token ids", param)
    return llm.tokenizer


def tokenize(llm: LLM, request: TokenizeRequest) -> list[int]:
    """Raises: Fault 400."""
    if (request.prompt is None) == (request.messages is None):
        raise Fault(400, "give one of prompt and messages", "prompt")
    if request.messages is not None:
        whole = request.add_generation_prompt is not False
        return render(llm, request.messages, request.chat_template_kwargs or {}, request.tools, whole)
    assert request.prompt is not None
    try:
        return tokenizer_of(llm, "prompt").encode(request.prompt, request.add_special_tokens is not False)
    except UserError as error:
        raise of_user_error(error, {"text": "prompt"}) from error
