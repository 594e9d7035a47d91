"""Calls as a name and pairs of key and value between tags (Ling-3.0, Qwen3-Coder)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from soloist.text.reader import Wait
from soloist.text.tools.calls import END, ToolCalls, new_id
from soloist.text.tools.schemas import functions_of, kinds_of, parameters_of


@dataclass(frozen=True)
class Tags:
    """name: stands before a name, "" where the name comes at once; key, key_end, value, value_end: around keys and
    values; last: before `</tool_call>`; lines: a value stands on lines of its own, whose breaks are layout.
    """

    name: str
    key: str
    key_end: str
    value: str
    value_end: str
    last: str
    lines: bool


LING = Tags("", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "", lines=False)
QWEN = Tags("<function=", "<parameter=", ">", "", "</parameter>", "</function>", lines=True)


class PairCalls(ToolCalls):
    """Texts are written as they stand and are given as they come. Other values are JSON, given when they are complete;
    what is no JSON after all is given as a text.

    Args: tools: in OpenAI's form; they say which parameters are texts.
    """

    def __init__(self, tags: Tags, tools: Sequence[Mapping[str, Any]], new_id: Callable[[], str] = new_id):
        self._tags = tags
        self._parameters = {name: parameters_of(function) for name, function in functions_of(tools).items()}
        self._quoting, self._before = False, "{"
        self._line: str | None = ""
        self._value: list[str] = []
        super().__init__(new_id)

    def call(self) -> Wait[None]:
        name, mark = yield from self._name()
        self.announce(name)
        self._before = "{"
        parameters = self._parameters.get(name, {})
        properties = parameters.get("properties")
        while True:
            mark = mark or (yield from self.reader.one_of(self._tags.key, self._tags.last or END, END))
            if mark != self._tags.key:
                break
            key = yield from self._key()
            self.arguments(f"{self._before}{json.dumps(key, ensure_ascii=False)}: ")
            self._before = ", "
            schema = properties.get(key) if isinstance(properties, Mapping) else None
            yield from self._read(kinds_of(schema, parameters))
            mark = ""
        if mark != END:
            yield from self.reader.one_of(END)

    def complete(self) -> None:
        self.arguments("{}" if self._before == "{" else "}")

    def cut_short(self) -> None:
        rest = self.reader.rest()
        if self._quoting:
            self._quote(rest)
        elif self._value:
            self.arguments("".join(self._value) + rest)

    def _name(self) -> Wait[tuple[str, str]]:
        """The name, and the tag behind it if it was read too."""
        tags, parts = self._tags, list[str]()
        if tags.name:
            yield from self.reader.one_of(tags.name)
            yield from self.reader.until(parts.append, ">")
            return "".join(parts), ""
        yield from self.reader.skip_space()
        mark = yield from self.reader.until(parts.append, "\n", tags.key, END)
        return "".join(parts).strip(), mark.strip()

    def _key(self) -> Wait[str]:
        parts: list[str] = []
        yield from self.reader.until(parts.append, self._tags.key_end)
        if self._tags.value:
            yield from self.reader.one_of(self._tags.value)
        return "".join(parts)

    def _read(self, kinds: frozenset[str]) -> Wait[None]:
        """One value, with the tag behind it."""
        if kinds == {"string"}:
            self._quoting, self._line = True, "" if not self._tags.lines else None
            self.arguments('"')
            yield from self.reader.until(self._quote, self._tags.value_end)
            self.arguments('"')
            self._quoting = False
            return
        yield from self.reader.until(self._value.append, self._tags.value_end)
        text, self._value = "".join(self._value), []
        self.arguments(_as_json(text.removeprefix("\n").removesuffix("\n") if self._tags.lines else text, kinds))

    def _quote(self, text: str) -> None:
        """Give a part of a text. A line break at its end is kept back: it may be the last, which is layout."""
        if self._tags.lines:
            if self._line is None:
                self._line, text = "", text.removeprefix("\n")
            text = self._line + text
            self._line = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        self.arguments(json.dumps(text, ensure_ascii=False)[1:-1])


def _as_json(text: str, kinds: frozenset[str]) -> str:
    """A value as JSON: itself where it is JSON of a kind that may stand here, otherwise a text."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    kind = _kind(value)
    if "string" in kinds and kind not in kinds and not (kind == "integer" and "number" in kinds):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def _refuse(constant: str) -> NoReturn:
    """Python reads NaN and Infinity, which are no JSON."""
    raise ValueError(constant)


def _kind(value: object) -> str:
    for kind, types in _KINDS.items():
        if isinstance(value, types):
            return kind
    raise AssertionError(value)


_KINDS: dict[str, type | tuple[type, ...]] = {
    "null": type(None), "boolean": bool, "integer": int, "number": float, "string": str, "array": list, "object": dict,
}  # fmt: skip
