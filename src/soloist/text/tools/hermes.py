"""Calls as one JSON object, `{"name": ..., "arguments": {...}}` (Hermes, Qwen2.5, Qwen3)."""

from __future__ import annotations

import json

from soloist.text.reader import Malformed, Wait
from soloist.text.tools.calls import END, ToolCalls


class HermesCalls(ToolCalls):
    """The arguments are given as the model writes them. `parameters` is understood too, and any order of the keys."""

    def call(self) -> Wait[None]:
        early: list[str] = []
        named = False
        mark = yield from self.reader.one_of("{")
        while mark != "}":
            key = yield from self._value()
            yield from self.reader.one_of(":")
            if key == "name" and not named:
                self.announce(str((yield from self._value())))
                named = True
                self.arguments("".join(early))
            elif key in ("arguments", "parameters"):
                yield from self.reader.json(self.arguments if named else early.append)
            else:
                yield from self._value()
            mark = yield from self.reader.one_of(",", "}")
        if not named:
            raise Malformed("no name")
        yield from self.reader.one_of(END)

    def complete(self) -> None:
        """Everything was given as it came."""

    def cut_short(self) -> None:
        """Everything was given as it came."""

    def _value(self) -> Wait[object]:
        parts: list[str] = []
        yield from self.reader.json(parts.append)
        try:
            value: object = json.loads("".join(parts))
        except ValueError as error:
            raise Malformed(str(error)) from error
        return value
