"""Tools, schemas and reasoning by OpenAI's client: a stream's deltas add up to the answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from soloist import LLM
from soloist.testing.checkpoints import write_checkpoint

pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")
from tests.serving import Address, serving

MESSAGES = [{"role": "user", "content": "The train leaves at"}]
PARAMETERS = {
    "type": "object", "properties": {"n": {"type": "integer", "enum": [1, 2]}}, "required": ["n"], "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "look_up"}}
HERMES = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if tools %}Answer with <tool_call>{{ tools | tojson }}</tool_call>\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """A model of random weights, so what keeps to a form is the grammar's doing."""
    folder = write_checkpoint(tmp_path_factory.mktemp("tools") / "tiny", "llama", tokenizer=True)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": HERMES}))
    with LLM(str(folder), device="cpu", drafter="ngram", context_length=512) as llm, serving(llm) as address:
        yield address


def ask(server: Address, **more: Any) -> Any:
    asked = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 200, **more}
    return server.client().chat.completions.create(**asked)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_tool_is_called_alike_in_stream_and_answer(server: Address, choice: Any) -> None:
    asked = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    whole = ask(server, **asked).choices[0]
    calls = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls" and [call.function.name for call in calls] == ["look_up"]
    assert json.loads(calls[0].function.arguments)["n"] in (1, 2)
    rounds = [chunk.choices[0] for chunk in ask(server, **asked, stream=True)]
    deltas = [delta for one in rounds for delta in one.delta.tool_calls or ()]
    assert rounds[-1].finish_reason == "tool_calls" and {delta.index for delta in deltas} == {0}
    assert deltas[0].id and all(delta.id is None for delta in deltas[1:])
    assert "".join(delta.function.name or "" for delta in deltas) == "look_up"
    assert "".join(delta.function.arguments or "" for delta in deltas) == calls[0].function.arguments


@pytest.mark.parametrize("more", [{"tools": [TOOL], "tool_choice": "none"}, {"tools": [TOOL]}, {}], ids=["none", "auto", "no"])
def test_negative_control_otherwise_this_model_calls_nothing(server: Address, more: dict[str, Any]) -> None:
    assert not ask(server, **more).choices[0].message.tool_calls


def test_the_result_of_a_tool_goes_back_to_the_model(server: Address) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"n": 1}'}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "17:45"}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, result]
    with_result = ask(server, messages=messages, tools=[TOOL], max_tokens=6)
    assert with_result.usage.prompt_tokens > ask(server, tools=[TOOL], max_tokens=6).usage.prompt_tokens


def test_an_answer_keeps_to_its_json_schema(server: Address) -> None:
    schema = {"name": "one", "strict": True, "schema": {"type": "object", "properties": {"a": {"enum": [7]}},
              "required": ["a"], "additionalProperties": False}}  # fmt: skip
    asked = {"response_format": {"type": "json_schema", "json_schema": schema}, "max_tokens": 60}
    assert json.loads(ask(server, **asked).choices[0].message.content) == {"a": 7}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(server, **asked, stream=True)) == '{"a": 7}'


def test_what_looks_like_a_call_is_text_where_there_are_no_tools(server: Address) -> None:
    said = '<tool_call>{"name": "look_up", "arguments": {"n": 1}}</tool_call>'
    grammar = {"type": "regex", "regex": said.replace("{", r"\{").replace("}", r"\}")}
    asked = {"response_format": grammar}
    message = ask(server, **asked).choices[0].message
    assert message.content == said and not message.tool_calls
    assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(server, **asked, stream=True)) == said
