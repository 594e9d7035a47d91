"""Conversations to prompts, by the template that comes with a model.

Templates are programs from a download: they run in jinja's immutable sandbox, with the same settings and functions that
transformers gives them, so that a prompt is the one the model was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from soloist.errors import UserError

_FAILURES = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""What an expression of a template can raise on messages that it does not expect."""


class ChatTemplates:
    """The chat templates of one model, compiled when first used.

    Args: templates: name -> jinja; special_tokens: names that templates know; origin: the file, for messages.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str], origin: str):
        self._texts, self._special_tokens, self._origin = templates, special_tokens, origin
        self._compiled: dict[str, Template] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt.   Raises: UserError without a template, for odd messages, and for what the template refuses."""
        template = self._choose(bool(tools))
        known = {
            **self._special_tokens,
            "messages": read_messages(messages),
            "tools": _read_tools(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render({**known, **variables})
        except _FAILURES as failure:
            complaint = _one_line(failure)
            raise UserError(f"{self._origin}: the chat template refuses the messages: {complaint}") from failure

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the templates read and do not give themselves.   Raises: UserError for a damaged template."""
        try:
            trees = [_ENVIRONMENT.parse(text) for text in self._texts.values()]
        except TemplateError as error:
            raise UserError(f"{self._origin}: the chat template is damaged: {_one_line(error)}") from error
        return frozenset(name for tree in trees for name in meta.find_undeclared_variables(tree))

    def _choose(self, with_tools: bool) -> Template:
        """`tool_use` where there are tools and such a template, otherwise `default`."""
        if not self._texts:
            raise UserError(
                f"{self._origin}: the model has no chat template, so it takes no messages; give the prompt as text"
            )
        name = "tool_use" if with_tools and "tool_use" in self._texts else "default"
        if name not in self._texts:
            raise UserError(f"{self._origin}: has no default chat template, only {', '.join(sorted(self._texts))}")
        if name not in self._compiled:
            try:
                self._compiled[name] = _ENVIRONMENT.from_string(self._texts[name])
            except TemplateError as error:
                raise UserError(f"{self._origin}: the chat template is damaged: {_one_line(error)}") from error
        return self._compiled[name]


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: content is one text, the arguments of a tool call are an object.

    Other keys are kept. Raises: UserError naming the message.
    """
    if not messages:
        raise UserError("messages is empty; give at least one, such as {'role': 'user', 'content': 'Hello'}")
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _read_message(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(f"{place} is a {type(message).__name__}; it must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UserError(f"{place}: role={role!r} must be a text such as 'user', 'assistant' or 'system'")
    read = dict(message)
    calls = message.get("tool_calls")
    if calls:
        read["tool_calls"] = _read_calls(calls, f"{place}.tool_calls")
    elif message.get("content") is None:
        raise UserError(f"{place}: has no content; only a message with tool_calls may lack it")
    read["content"] = _read_content(message.get("content"), f"{place}.content")
    return read


def _read_content(content: Any, place: str) -> str:
    """Parts are joined by line ends, as vLLM and llama.cpp do; no content is an empty text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise UserError(f"{place} is a {type(content).__name__}; it must be a text or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UserError(f"{place}[{i}] is of kind {kind!r}; only {{'type': 'text', 'text': ...}} is supported")
        texts.append(part["text"])
    return "\n".join(texts)


def _read_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Arguments travel as JSON text in the OpenAI format, but templates write them down themselves."""
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise UserError(f"{place} must be a list of objects")
    read = []
    for i, call in enumerate(calls):
        inner = call.get("function", call)
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise UserError(f"{place}[{i}] must name its function: {{'function': {{'name': ..., 'arguments': ...}}}}")
        inner = {**inner, "arguments": _read_arguments(inner.get("arguments"), f"{place}[{i}]")}
        read.append({**call, "function": inner} if "function" in call else inner)
    return read


def _read_arguments(arguments: Any, place: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except json.JSONDecodeError as error:
            raise UserError(f"{place}: arguments are not valid JSON: {error}") from None
    if not isinstance(arguments, Mapping | None):
        raise UserError(f"{place}: arguments must be a JSON object, not {arguments!r}")
    return dict(arguments or {})


def _read_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if isinstance(tools, str) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UserError("tools must be a list of objects such as {'type': 'function', 'function': {'name': ...}}")
    return [dict(tool) for tool in tools] or None


class _Generation(Extension):
    """`{% generation %}` marks answers for training and writes nothing itself."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja's own filter escapes HTML, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


_ENVIRONMENT = _environment()
