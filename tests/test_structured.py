"""Structured output on nano: every answer has the form asked for, and is the one of plain constrained decoding."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import jsonschema
import llguidance
import pytest
import torch

from soloist import LLM, SamplingParams
from soloist.errors import UserError
from soloist.llm import Output, Prompt
from soloist.text.grammar import SPACING
from tests.llms import nano
from tests.schemas import SCHEMAS

PROMPT: Prompt = [{"role": "user", "content": "Give me some JSON."}]
DRAFTERS = ("ngram", "mtp", "dspark")
FEW = ("text", "enum-unicode", "object-optional", "array-of-objects", "references")


def shaped(name: str) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMAS[name]}}


def ask(llm: LLM, response_format: dict[str, Any] | None, prompt: Prompt = PROMPT, **more: Any) -> Output:
    asked = {"temperature": 0.0, "seed": 5, "max_tokens": 160, **more}
    return llm.generate(prompt, SamplingParams(response_format=response_format, **asked))


@cache
def plain(name: str, temperature: float) -> tuple[list[int], str]:
    out = ask(nano(), shaped(name), temperature=temperature)
    return out.token_ids, out.text


def check(drafter: str, width: int | str, name: str, temperature: float) -> None:
    out = ask(nano(drafter, width), shaped(name), temperature=temperature)
    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(json.loads(out.text))
    assert out.finish_reason == "stop" and out.stop_reason is None
    assert (out.token_ids, out.text) == plain(name, temperature)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_answers_validate_and_are_those_of_plain_constrained_decoding(drafter: str) -> None:
    for place, name in enumerate(FEW):
        check(drafter, "auto", name, (0.0, 1.0)[place % 2])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_validates_and_is_that_of_plain_constrained_decoding(
    name: str, drafter: str, temperature: float
) -> None:
    check(drafter, "auto", name, temperature)


@pytest.mark.parametrize(("drafter", "width"), [("ngram", 1), ("mtp", 3), ("ngram", 15)])
def test_no_width_changes_a_constrained_answer(drafter: str, width: int) -> None:
    for name in ("array-of-objects", "constant-text"):
        check(drafter, width, name, 0.7)


def test_negative_control_without_the_grammar_no_answer_validates() -> None:
    """The schemas ask for what nano would not write by itself."""
    out = ask(nano(), None, max_tokens=60)
    for name in FEW:
        with pytest.raises((jsonschema.ValidationError, json.JSONDecodeError)):
            jsonschema.validate(json.loads(out.text), SCHEMAS[name])


@pytest.mark.parametrize("name", ["object-optional", "enum-escapes"])
def test_plain_constrained_decoding_picks_the_best_token_the_grammar_allows(name: str) -> None:
    """Against a loop that knows neither windows nor rollback: a new matcher and a whole forward pass for every token."""
    llm = nano()
    ids, found = llm.encode(PROMPT), list[int]()
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(SCHEMAS[name]), defaults=SPACING)  # type: ignore[arg-type]
    tokenizer = llm._grammars._tokenizer
    while not found or found[-1] not in llm.eos_token_ids:
        matcher = llguidance.LLMatcher(tokenizer, grammar)
        assert matcher.consume_tokens(found) or not found
        allowed = torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8) > 0
        logits = llm.logits(ids + found)[-1].masked_fill(~allowed, float("-inf"))
        found.append(int(logits.argmax()))
    assert found == plain(name, 0.0)[0]


@pytest.mark.parametrize("drafter", ["none", "dspark"])
@pytest.mark.parametrize(
    "response_format, law",
    [
        ({"type": "json_object"}, r"\{.*\}"),
        ({"type": "regex", "regex": r"[a-f]{3}(-[0-9]+){2}\."}, r"[a-f]{3}(-[0-9]+){2}\."),
        ({"type": "grammar", "grammar": 'start: word (" " word)~2\nword: /[a-z]{2,6}/'}, r"[a-z]{2,6}( [a-z]{2,6}){2}"),
        ({"type": "grammar", "grammar": 'root ::= "<" [a-z]+ ">" [0-9] [0-9]'}, r"<[a-z]+>[0-9][0-9]"),
    ],
    ids=["json_object", "regex", "lark", "gbnf"],
)
def test_other_formats_hold_with_and_without_a_drafter(drafter: str, response_format: dict[str, Any], law: str) -> None:
    out = ask(nano(drafter), response_format, temperature=0.8)
    assert out.finish_reason == "stop" and re.fullmatch(law, out.text, re.DOTALL), out.text
    assert out.token_ids == ask(nano(), response_format, temperature=0.8).token_ids


def test_a_stream_and_other_parameters_give_what_plain_constrained_decoding_gives() -> None:
    more = {"temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.5, "logit_bias": {92: 2.0}, "logprobs": 2}
    params = SamplingParams(seed=1, max_tokens=100, response_format=shaped("order"), **more)  # type: ignore[arg-type]
    expected = nano().generate(PROMPT, params)
    events = list(nano("mtp").stream(PROMPT, params))
    out = events[-1].output
    assert out is not None and "".join(event.text for event in events) == expected.text
    assert (out.token_ids, out.logprobs) == (expected.token_ids, expected.logprobs)


def test_rejection_sampling_keeps_to_the_grammar() -> None:
    out = ask(nano("mtp", 3, "rejection"), shaped("array-of-objects"), temperature=1.0)
    jsonschema.validate(json.loads(out.text), SCHEMAS["array-of-objects"])


def test_drafts_that_the_grammar_forbids_change_nothing(tmp_path: Any) -> None:
    """Also not the request after, on a model with recurrent state."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"script": [7]}))
    free = ask(nano(), None, max_tokens=30).token_ids
    llm = nano().with_drafter("scripted", str(script), 4)
    assert ask(llm, shaped("object-optional")).token_ids == plain("object-optional", 0.0)[0]
    assert ask(llm, None, max_tokens=30).token_ids == free


def test_what_the_grammar_forces_is_accepted_whoever_drafts() -> None:
    out = ask(nano("ngram", 7), shaped("constant"))
    assert out.text == '{"a": [1, 2, {"b": null}], "c": "d"}'
    assert out.timings.rounds == -(-(len(out.token_ids) - 1) // 8)


def test_max_tokens_cuts_a_constrained_answer_with_reason_length() -> None:
    out = ask(nano("mtp"), shaped("references"), max_tokens=9)
    assert (out.finish_reason, out.token_ids) == ("length", plain("references", 0.0)[0][:9])


@pytest.mark.parametrize("drafter", ["none", "mtp"])
def test_the_grammar_begins_behind_the_reasoning(drafter: str) -> None:
    llm = nano(drafter)
    assert llm.tokenizer is not None
    asked = llm.tokenizer.render_chat([{"role": "user", "content": "Think, then write JSON."}], enable_thinking=True)
    assert asked.endswith("<think>")
    prompt = llm.tokenizer.encode(asked, add_special=False)
    out = ask(llm, shaped("object"), prompt, temperature=0.7)
    _, answer = out.text.split("</think>")
    assert out.finish_reason == "stop"
    jsonschema.validate(json.loads(answer), SCHEMAS["object"])
    assert out.token_ids == ask(nano(), shaped("object"), prompt, temperature=0.7).token_ids


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "json_schema": {"schema": {"type": "wrong"}}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "object", "patternProperties": {"(": {}}}}},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/missing"}}},
        {"type": "json_schema", "json_schema": {"schema": False}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "array", "uniqueItems": True}}},
        {"type": "regex", "regex": "(unclosed"},
        {"type": "grammar", "grammar": "start: missing"},
    ],
    ids=["type", "pattern", "reference", "false", "keyword", "regex", "grammar"],
)
def test_what_no_grammar_can_hold_is_refused_in_one_line_before_anything_runs(response_format: dict[str, Any]) -> None:
    llm = nano()
    with pytest.raises(UserError, match="^response_format: ") as caught:
        llm.stream(PROMPT, SamplingParams(response_format=response_format))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert ask(llm, shaped("enum")).token_ids == plain("enum", 0.0)[0]


def test_without_llguidance_a_request_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = nano().plain()
    llm.__dict__.pop("_grammars", None)
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(UserError, match=r"soloist\[grammar\]"):
        ask(llm, shaped("text"))
