"""tool_choice of a chat request, kept by a grammar on nano, which by itself calls nothing."""

from __future__ import annotations

import json
from threading import Event
from typing import Any

import msgspec
import pytest

from soloist.server.faults import Fault
from soloist.server.prepare import prepare_chat
from soloist.server.wire import ChatRequest
from tests.llms import nano

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
         {"type": "function", "function": {"name": "time"}}]  # fmt: skip
NAMED = {"type": "function", "function": {"name": "weather"}}


def calls(drafter: str, **extra: Any) -> list[tuple[str, Any]]:
    body = {"messages": [{"role": "user", "content": "Weather in Paris?"}], "tools": TOOLS, "max_tokens": 80, "seed": 1,
            "temperature": 0.8, **extra}  # fmt: skip
    work = prepare_chat(nano(drafter), msgspec.convert(body, ChatRequest), Event())
    parser = work.parser()
    deltas = [*(parser.push(event.text) for event in work.streams[0]), parser.flush()]
    found: dict[int, tuple[str, str]] = {}
    for one in (call for delta in deltas for call in delta.calls):
        name, arguments = found.get(one.index, (one.name or "", ""))
        found[one.index] = name, arguments + one.arguments
    return [(name, json.loads(arguments)) for name, arguments in found.values()]


def test_a_named_tool_is_called_once_with_arguments_that_fit_whoever_drafts() -> None:
    [(name, arguments)] = calls("none", tool_choice=NAMED)
    assert name == "weather" and arguments["city"] in ("Paris", "Rome") and arguments["days"] in range(10)
    assert calls("mtp", tool_choice=NAMED) == calls("ngram", tool_choice=NAMED) == [(name, arguments)]


def test_required_calls_one_of_the_tools_and_once_where_calls_may_not_be_parallel() -> None:
    found = calls("mtp", tool_choice="required", parallel_tool_calls=False)
    assert len(found) == 1 and found[0][0] in ("weather", "time")


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_negative_control_otherwise_nano_calls_nothing(choice: str) -> None:
    assert calls("mtp", tool_choice=choice) == []


@pytest.mark.parametrize(
    "extra, param",
    [
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": "nope"}}, "tool_choice"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tools": [{"name": "no function"}]}, "tools"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_cannot_be_promised_is_a_400_that_names_the_field(extra: dict[str, Any], param: str) -> None:
    with pytest.raises(Fault) as caught:
        calls("mtp", **extra)
    assert (caught.value.status, caught.value.param) == (400, param)
