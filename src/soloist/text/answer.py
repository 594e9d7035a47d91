"""An answer taken apart while it arrives: reasoning, content, tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from soloist.text.reasoning import Reasoning, ReasoningSplit
from soloist.text.tools.calls import BEGIN, CallDelta, ToolCalls


@dataclass
class AnswerDelta:
    """What a piece of text brought, in OpenAI's fields: reasoning_content, content, tool_calls."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class AnswerParser:
    """The deltas joined are the same, however the text was cut.

    reasoning: see `reasoning_of`; calls: where the request has tools, otherwise what looks like a call is content.
    """

    def __init__(self, reasoning: Reasoning = Reasoning.NONE, calls: ToolCalls | None = None):
        self._split = ReasoningSplit(reasoning, () if calls is None else (BEGIN,))
        self._calls = calls
        self.called = False

    def push(self, text: str) -> AnswerDelta:
        reasoning, answer = self._split.push(text)
        return self._delta(reasoning, *(self._calls.push(answer) if self._calls else (answer, [])))

    def flush(self) -> AnswerDelta:
        """The rest, when no text follows. `called` then says whether finish_reason `stop` becomes `tool_calls`."""
        reasoning, answer = self._split.flush()
        if self._calls is None:
            return self._delta(reasoning, answer, [])
        content, calls = self._calls.push(answer)
        last, more = self._calls.flush()
        return self._delta(reasoning, content + last, _joined(calls, more))

    def _delta(self, reasoning: str, content: str, calls: list[CallDelta]) -> AnswerDelta:
        self.called = self.called or bool(calls)
        return AnswerDelta(reasoning, content, calls)


def _joined(first: list[CallDelta], then: list[CallDelta]) -> list[CallDelta]:
    """Two lists of deltas with one delta a call."""
    if first and then and first[-1].index == then[0].index:
        last = first[-1]
        return [*first[:-1], CallDelta(last.index, last.id, last.name, last.arguments + then[0].arguments), *then[1:]]
    return first + then
