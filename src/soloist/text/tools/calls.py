"""Tool calls while they arrive: the text around them, their names, and the JSON of their arguments piece by piece."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from soloist.text.reader import Malformed, Reader, Wait

BEGIN, END = "<tool_call>", "</tool_call>"
_NAME = re.compile(r"[\w.\-]{1,128}")


@dataclass
class CallDelta:
    """What a piece of text brought of the call `index`. Its first delta has id and name; the arguments of all of them
    together are the JSON text.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


def new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ToolCalls:
    """Takes tool calls out of a text. A format is a subclass that reads what stands behind `<tool_call>`.

    White space beside calls is dropped where no other text stands on that side. What looked like a call and is none stays
    text. If the text ends inside a call whose name was complete, the arguments are given as far as their values came;
    otherwise all of it is text.
    """

    def __init__(self, new_id: Callable[[], str] = new_id):
        self.reader, self._new_id = Reader(), new_id
        self._content: list[str] = []
        self._deltas: list[CallDelta] = []
        self._index = -1
        self._inside = self._announced = self._shown = False
        self._space = ""
        self._parse = self._run()
        next(self._parse)

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """Returns: the content and the deltas of calls, at most one a call, that the text brought."""
        self.reader.feed(text)
        next(self._parse)
        return self._taken()

    def flush(self) -> tuple[str, list[CallDelta]]:
        """The rest, when no text follows."""
        if self._announced:
            self.cut_short()
        else:
            self.reader.rewind()
            self._text((BEGIN if self._inside else "") + self.reader.rest())
        if self._index < 0:
            self._content.append(self._space)
        return self._taken()

    # ---- for formats ------------------------------------------------------------------------------------------------

    def call(self) -> Wait[None]:
        """Read one call, with `</tool_call>`.   Raises: Malformed, before `announce` or after."""
        raise NotImplementedError

    def complete(self) -> None:
        """The call is over, or cannot be followed any further."""
        raise NotImplementedError

    def cut_short(self) -> None:
        """The text ended behind `announce`: give what is left of a value."""
        raise NotImplementedError

    def announce(self, name: str) -> None:
        """The call's name is known. Raises: Malformed if it is none."""
        if not _NAME.fullmatch(name):
            raise Malformed(name)
        self.reader.forget()
        self._announced = True
        self._index += 1
        self._deltas.append(CallDelta(self._index, self._new_id(), name, ""))

    def arguments(self, text: str) -> None:
        if not self._deltas or self._deltas[-1].index != self._index:
            self._deltas.append(CallDelta(self._index, None, None, ""))
        self._deltas[-1].arguments += text

    # ---- the text around ---------------------------------------------------------------------------------------------

    def _run(self) -> Wait[None]:
        while True:
            yield from self.reader.until(self._text, BEGIN)
            self.reader.mark()
            self._inside, self._announced = True, False
            try:
                yield from self.call()
            except Malformed:
                if not self._announced:
                    self.reader.rewind()
                    self._text(BEGIN)
            if self._announced:
                self.complete()
            self._inside = self._announced = False

    def _text(self, text: str) -> None:
        """Content; white space at its end waits until it is known whether text follows."""
        text = self._space + text
        if self._index >= 0 and not self._shown:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._shown = self._shown or bool(shown)
        self._content.append(shown)

    def _taken(self) -> tuple[str, list[CallDelta]]:
        content, deltas = "".join(self._content), self._deltas
        self._content, self._deltas = [], []
        return content, deltas
