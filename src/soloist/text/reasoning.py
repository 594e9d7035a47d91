"""Reasoning: the part of an answer that comes before `</think>`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from soloist.text.reader import Malformed, Reader, Wait
from soloist.text.tokenizer import Tokenizer

BEGIN, END = "<think>", "</think>"
_TAIL = 64
"""Tokens at the end of a prompt that hold all of what a template writes before an answer."""


class Reasoning(Enum):
    """How an answer begins.

    NONE: with the answer. OPEN: in the midst of reasoning, the prompt having opened it, with nothing between tags and
    text. OPEN_LINE: so too, and line breaks beside the tags are layout. POSSIBLE: the model may open it.
    """

    NONE = "none"
    OPEN = "open"
    OPEN_LINE = "open_line"
    POSSIBLE = "possible"


def reasoning_of(tokenizer: Tokenizer, prompt: Sequence[int]) -> Reasoning:
    """What the end of a prompt says of the answer. Only behind a template that knows `<think>` may a model open it."""
    tail = tokenizer.decode(prompt[-_TAIL:], skip_special=False)
    if tail.endswith(BEGIN):
        return Reasoning.OPEN
    if tail.rstrip().endswith(BEGIN):
        return Reasoning.OPEN_LINE
    opening = tokenizer.generation_prompt
    if opening and BEGIN in tokenizer.chat_template and tail.endswith(opening) and END not in opening:
        return Reasoning.POSSIBLE
    return Reasoning.NONE


class ReasoningSplit:
    """Tells reasoning from the answer behind it. The tags are dropped, and line breaks beside them where they are layout.

    ends: other tags that end the reasoning; they belong to the answer.
    """

    def __init__(self, reasoning: Reasoning, ends: Sequence[str] = ()):
        self._layout = reasoning in (Reasoning.OPEN_LINE, Reasoning.POSSIBLE)
        self._reader, self._ends = Reader(), (END, *ends)
        self._reasoning: list[str] = []
        self._answer: list[str] = []
        self._breaks = ""
        self._leading = True
        self.inside = reasoning in (Reasoning.OPEN, Reasoning.OPEN_LINE)
        self._parse = self._run(reasoning)
        next(self._parse)

    def push(self, text: str) -> tuple[str, str]:
        """Returns: the reasoning and the part of the answer that this text brought."""
        self._reader.feed(text)
        next(self._parse)
        return self._taken()

    def flush(self) -> tuple[str, str]:
        """The rest, when no text follows. Reasoning that was not finished stays reasoning."""
        self._reader.rewind()
        if self.inside:
            self._reasoning.append(self._breaks + self._reader.rest())
        else:
            self._say(self._reader.rest())
        return self._taken()

    def _run(self, reasoning: Reasoning) -> Wait[None]:
        reader = self._reader
        if reasoning is Reasoning.POSSIBLE:
            reader.mark()
            try:
                yield from reader.one_of(BEGIN)
                reader.forget()
                self.inside = True
            except Malformed:
                reader.rewind()
        self._leading = self.inside and self._layout
        if self.inside:
            tag = yield from reader.until(self._reason, *self._ends)
            self.inside, self._leading = False, self._layout
            self._say(tag.removeprefix(END))
        while True:
            self._say(reader.rest())
            yield

    def _reason(self, text: str) -> None:
        """Line breaks at the end wait until it is known whether the tag follows."""
        if self._layout:
            text = self._breaks + self._without_leading(text)
            self._breaks = text[len(text.rstrip("\n")) :]
            text = text.rstrip("\n")
        self._reasoning.append(text)

    def _say(self, text: str) -> None:
        self._answer.append(self._without_leading(text))

    def _without_leading(self, text: str) -> str:
        if self._leading:
            text = text.lstrip("\n")
            self._leading = not text
        return text

    def _taken(self) -> tuple[str, str]:
        taken = "".join(self._reasoning), "".join(self._answer)
        self._reasoning, self._answer = [], []
        return taken


def count_reasoning(tokenizer: Tokenizer, token_ids: Sequence[int], reasoning: Reasoning) -> int:
    """How many tokens of an answer are reasoning, with the tags."""
    split, detokenizer = ReasoningSplit(reasoning), tokenizer.detokenizer()
    count = 0
    for place, token in enumerate(token_ids, 1):
        was_inside = split.inside
        split.push(detokenizer.push(token))
        if was_inside or split.inside:
            count = place
        elif count:
            break
    return count
