"""Answers taken apart while they arrive: what comes out does not depend on how the text was cut, and nothing is lost."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soloist.errors import UserError
from soloist.ops.allow import num_words
from soloist.text.answer import AnswerParser
from soloist.text.grammar import Grammars
from soloist.text.reasoning import Reasoning
from soloist.text.tokenizer import load_tokenizer
from soloist.text.tools.choice import read_choice, tool_grammar
from soloist.text.tools.formats import ToolFormat, tool_calls, tool_format
from soloist.weights.checkpoint import open_checkpoint
from soloist.weights.hub import resolve_model_path

TOOLS = [
    {"type": "function", "function": {"name": "weather", "strict": True, "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 0, "maximum": 9},
                                         "note": {"type": ["string", "null"]}},
        "required": ["city", "days"], "additionalProperties": False}}},
    {"type": "function", "function": {"name": "time"}},
]  # fmt: skip
CALLS = {
    ToolFormat.LING: (
        '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Par"<is\n</arg_value>\n'
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        "<tool_call>time\n</tool_call>",
    ),
    ToolFormat.QWEN: (
        '<tool_call>\n<function=weather>\n<parameter=city>\nPar"<is\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
        "</function>\n</tool_call>",
        "<tool_call>\n<function=time>\n</function>\n</tool_call>",
    ),
    ToolFormat.HERMES: (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Par\\"<is\\n", "days": 3}}\n</tool_call>',
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    ),
}
EXPECTED = [("weather", {"city": 'Par"<is\n', "days": 3}), ("time", {})]
PARTS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "Grüße 🎉", "\n", " <", "{", '"a\\"']
PARTS += [part for calls in CALLS.values() for call in calls for part in (call, call[:40], call[-30:])]
FORMATS = [None, *ToolFormat]

Parsed = tuple[str, str, list[tuple[str, str]]]


def parse(pieces: list[str], format: ToolFormat | None, reasoning: Reasoning = Reasoning.NONE) -> Parsed:
    parser = AnswerParser(reasoning, None if format is None else tool_calls(format, TOOLS))
    thought, said = "", ""
    calls: dict[int, tuple[str, str]] = {}
    for delta in [*map(parser.push, pieces), parser.flush()]:
        thought, said = thought + delta.reasoning, said + delta.content
        for one in delta.calls:
            name, arguments = calls.get(one.index, (one.name or "", ""))
            assert (one.id is not None) == (one.index not in calls)
            calls[one.index] = name, arguments + one.arguments
    return thought, said, list(calls.values())


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(PARTS), max_size=6),
    st.lists(st.integers(0, 300), max_size=12),
    st.sampled_from(FORMATS),
    st.sampled_from(list(Reasoning)),
)
def test_the_result_does_not_depend_on_how_the_text_was_cut(
    parts: list[str], cuts: list[int], format: ToolFormat | None, reasoning: Reasoning
) -> None:
    text = "".join(parts)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    whole = parse([text], format, reasoning)
    assert parse(pieces, format, reasoning) == whole == parse(list(text), format, reasoning)


@pytest.mark.parametrize("format", ToolFormat)
def test_calls_come_out_as_the_model_meant_them(format: ToolFormat) -> None:
    first, second = CALLS[format]
    _, content, calls = parse([f"Let me see.\n{first}\n{second}\n"], format)
    assert content == "Let me see."
    assert [(name, json.loads(arguments)) for name, arguments in calls] == EXPECTED


@pytest.mark.parametrize("format", ToolFormat)
def test_a_call_cut_short_is_text_before_its_name_is_known_and_arguments_after(format: ToolFormat) -> None:
    call = CALLS[format][0]
    known = False
    for end in range(len(call)):
        _, content, calls = parse([call[:end]], format)
        assert (content == call[:end]) != bool(calls)
        assert bool(calls) >= known
        known = bool(calls)
        if 'Par' in call[:end]:
            assert "Par" in calls[0][1]
    assert known


def test_what_is_no_call_stays_text_and_without_tools_everything_does() -> None:
    for format in ToolFormat:
        assert parse(["<tool_call>two words</tool_call> so"], format) == ("", "<tool_call>two words</tool_call> so", [])
    text = CALLS[ToolFormat.LING][0]
    assert parse([text], None) == ("", text, [])


def test_reasoning_ends_at_its_tag_or_at_a_call_and_unfinished_stays_reasoning() -> None:
    call = CALLS[ToolFormat.LING][1]
    assert parse(["\nab</think>\nc"], None, Reasoning.OPEN) == ("\nab", "\nc", [])
    assert parse(["\nab\n</think>\n\nc"], None, Reasoning.OPEN_LINE) == ("ab", "c", [])
    assert parse(["<think>\nab\n</think>\n\nc"], None, Reasoning.POSSIBLE) == ("ab", "c", [])
    assert parse(["c <think>"], None, Reasoning.POSSIBLE) == ("", "c <think>", [])
    assert parse(["cut off"], None, Reasoning.OPEN) == ("cut off", "", [])
    assert parse(["ab" + call], ToolFormat.LING, Reasoning.OPEN) == ("ab", "", [("time", "{}")])


def test_choices_and_formats_that_are_none_are_refused() -> None:
    assert read_choice({"type": "function", "function": {"name": "time"}}, TOOLS) == "=time"
    assert [read_choice(None, TOOLS), read_choice(None, [])] == ["auto", "none"]
    for wrong in ("always", {"type": "function", "function": {"name": "nope"}}, 3):
        with pytest.raises(UserError, match="tool_choice"):
            read_choice(wrong, TOOLS)
    with pytest.raises(UserError, match="tools"):
        tool_format("{{ messages }}")


TOKENIZER = load_tokenizer(open_checkpoint(resolve_model_path("nano")).tokenizer_source)
assert TOKENIZER is not None
END, V = 8180, 8192
GRAMMARS = Grammars(TOKENIZER, V, (END, 8177))


def follows(response_format: dict[str, object] | None, text: str, reasoning: Reasoning = Reasoning.NONE) -> bool:
    assert response_format is not None and TOKENIZER is not None
    grammar, rows = GRAMMARS.begin(response_format, reasoning), np.zeros((1, num_words(V)), np.int32)
    for token in [*TOKENIZER.encode(text, add_special=False), END]:
        grammar.fill(rows, [])
        if not rows[0, token >> 5] >> (token & 31) & 1:
            return False
        if token != END:
            grammar.advance([token])
    return True


@pytest.mark.parametrize("format", ToolFormat)
def test_the_grammar_of_a_tool_choice_lets_exactly_that_through(format: ToolFormat) -> None:
    first, second = CALLS[format]
    required, named = tool_grammar(format, TOOLS, "required"), tool_grammar(format, TOOLS, "=weather")
    strict, single = tool_grammar(format, TOOLS, "auto"), tool_grammar(format, TOOLS, "auto", parallel=False)
    both, bad, misnamed = first + "\n" + second, first.replace("3", "33"), first.replace("weather", "wether")
    cases = {"text": "Hello.", "first": first, "second": second, "both": both, "after": "See: " + first}
    allowed = {name: {case for case, text in cases.items() if follows(grammar, text)} for name, grammar in
               {"required": required, "named": named, "strict": strict, "single": single}.items()}  # fmt: skip
    assert allowed == {
        "required": {"first", "second", "both"}, "named": {"first"}, "strict": set(cases), "single": set(cases) - {"both"},
    }  # fmt: skip
    assert not any(follows(grammar, text) for grammar in (required, strict) for text in (bad, misnamed))
    assert tool_grammar(format, TOOLS[1:], "auto") is None and tool_grammar(format, TOOLS, "none") is None
    assert follows(required, "hm, <b>\n</think>" + first, Reasoning.OPEN) and not follows(required, first, Reasoning.OPEN)


SHAPE = {"type": "regex", "regex": "(ab|abc|b c)*[0-9]{1,3}"}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*"abc 0123", "ab", " c"]), max_size=8), st.integers(0, 3))
def test_the_rows_of_a_window_are_those_of_a_grammar_that_took_the_drafts_one_by_one(words: list[str], split: int) -> None:
    assert TOKENIZER is not None
    tokens = [token for word in words for token in TOKENIZER.encode(word, add_special=False)]
    grammar, rows = GRAMMARS.begin(SHAPE, Reasoning.NONE), np.zeros((len(tokens) + 1, num_words(V)), np.int32)
    for _ in range(2):  # the first time leaves no trace
        grammar.fill(rows, tokens)
    single = np.zeros((1, num_words(V)), np.int32)
    for place, token in enumerate(tokens):
        grammar.fill(single, [])
        assert (single[0] == rows[place]).all()
        if not single[0, token >> 5] >> (token & 31) & 1:
            assert (rows[place + 1 :] == -1).all()
            break
        grammar.advance([token])
