"""A text that arrives in pieces, for parsers written as generators: they yield wherever they need more of it.

A parser decides by characters alone, never by where a piece ends, so its result cannot depend on how the text was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

Value = TypeVar("Value")
Wait = Generator[None, None, Value]

_SCALAR_ENDS = frozenset(",]} \t\r\n")


class Malformed(Exception):
    """The text is not what the format promises."""


class Reader:
    """What has arrived and was not taken yet."""

    def __init__(self) -> None:
        self._text = ""
        self._marked: list[str] | None = None

    def feed(self, text: str) -> None:
        self._text += text

    def mark(self) -> None:
        """Remember what is taken from here on, until `rewind` or `forget`."""
        self._marked = []

    def forget(self) -> None:
        self._marked = None

    def rewind(self) -> None:
        """Go back to the mark, if there is one."""
        self._text = "".join(self._marked or ()) + self._text
        self._marked = None

    def rest(self) -> str:
        """Take everything."""
        return self._take(len(self._text))

    def until(self, give: Callable[[str], None], *tags: str) -> Wait[str]:
        """Give away the text before the first of some tags as it comes; take and return the tag.

        Tags begin with a character that they do not hold twice.
        """
        while True:
            found = [(at, tag) for tag in tags if (at := self._text.find(tag)) >= 0]
            at, tag = min(found, default=(len(self._text) - self._unfinished(tags), ""))
            if at:
                give(self._take(at))
            if tag:
                return self._take(len(tag))
            yield

    def _unfinished(self, tags: tuple[str, ...]) -> int:
        """Characters at the end that may turn out to begin a tag."""
        longest = min(len(self._text), max(map(len, tags)) - 1)
        ends = (n for n in range(longest, 0, -1) if any(tag.startswith(self._text[-n:]) for tag in tags))
        return next(ends, 0)

    def one_of(self, *tags: str) -> Wait[str]:
        """Skip white space; take and return the tag that comes next.   Raises: Malformed if none of them does."""
        while True:
            self._take(len(self._text) - len(self._text.lstrip()))
            for tag in tags:
                if self._text.startswith(tag):
                    return self._take(len(tag))
            if not any(tag.startswith(self._text) for tag in tags):
                raise Malformed(self._text[:40])
            yield

    def json(self, give: Callable[[str], None]) -> Wait[None]:
        """Give away one JSON value as it comes, white space before it skipped. Its brackets and strings are followed, no
        more. Raises: Malformed where no value comes, or `<` stands outside strings.
        """
        yield from self.skip_space()
        quoted = escaped = False
        depth, scalar = 0, self._text[0] not in '{["'
        while True:
            for at, letter in enumerate(self._text):
                if quoted:
                    quoted = escaped or letter != '"'
                    escaped = letter == "\\" and not escaped
                    if quoted or depth:
                        continue
                    give(self._take(at + 1))
                    return
                if scalar and depth == 0 and letter in _SCALAR_ENDS:
                    if at:
                        give(self._take(at))
                    return
                if letter == "<":
                    give(self._take(at))
                    raise Malformed("<")
                quoted = letter == '"'
                depth += (letter in "{[") - (letter in "}]")
                if letter in "}]" and depth == 0:
                    give(self._take(at + 1))
                    return
            give(self.rest())
            yield

    def skip_space(self) -> Wait[None]:
        """Skip white space up to the next character, which stays."""
        while True:
            self._take(len(self._text) - len(self._text.lstrip()))
            if self._text:
                return
            yield

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        if self._marked is not None:
            self._marked.append(taken)
        return taken
