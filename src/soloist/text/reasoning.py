"""Reasoning: the part of an answer that comes before `</think>`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

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
