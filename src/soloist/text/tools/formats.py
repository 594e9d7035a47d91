"""Which of the known formats a model writes its tool calls in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from soloist.errors import UserError
from soloist.text.tools.calls import BEGIN, ToolCalls
from soloist.text.tools.hermes import HermesCalls
from soloist.text.tools.pairs import LING, QWEN, PairCalls


class ToolFormat(Enum):
    """LING: name, then `<arg_key>` and `<arg_value>`. QWEN: `<function=` and `<parameter=`. HERMES: a JSON object."""

    LING = "ling"
    QWEN = "qwen"
    HERMES = "hermes"


def tool_format(chat_template: str, origin: str = "the model") -> ToolFormat:
    """The format that a chat template teaches.   Raises: UserError for a template that knows none of ours."""
    if BEGIN in chat_template:
        if "<arg_key>" in chat_template:
            return ToolFormat.LING
        return ToolFormat.QWEN if "<function=" in chat_template else ToolFormat.HERMES
    raise UserError(
        f"tools: the chat template of {origin} has no tool calls in a format that is supported "
        f"({', '.join(each.value for each in ToolFormat)}); remove tools, or use another model"
    )


def tool_calls(format: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> ToolCalls:
    """A parser for one answer to a request with these tools.   Raises: UserError for tools not in OpenAI's form."""
    if format is ToolFormat.HERMES:
        return HermesCalls()
    return PairCalls(LING if format is ToolFormat.LING else QWEN, tools)
