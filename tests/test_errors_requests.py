"""A bad request or setting is refused in one line that names the field, and leaves the engine as it was."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from soloist import LLM, SamplingParams
from soloist.errors import UserError
from tests import llms
from tests.llms import GREEDY, PROMPT

KINDS = ("ling-flash", "llama")


def refusal(action: Callable[[], Any]) -> str:
    """The message with which an action is refused; it must be one readable line."""
    with pytest.raises(UserError) as caught:
        action()
    message = str(caught.value)
    assert message and "\n" not in message and len(message) < 400, message
    return message


BAD_FORMATS: list[Any] = [
    "text",
    [],
    {},
    {"type": "xml"},
    {"type": ["text"]},
    {"type": "json_object", "schema": {}},
    {"type": "regex"},
    {"type": "regex", "regex": 5},
    {"type": "json_schema", "json_schema": {"name": "n"}},
    {"type": "json_schema", "json_schema": {"schema": "{}"}},
    {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}},
    {"type": "json_schema", "json_schema": {"schema": {}, "extra": 1}},
]
BAD_PARAMS: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (-0.1, math.nan, math.inf, "warm", None, True)),
    *(("top_p", value) for value in (0, -1, 1.01, math.nan, "all")),
    *(("top_k", value) for value in (-2, 1.5, "3", True, None)),
    *(("min_p", value) for value in (-0.1, 1.1, math.nan, None)),
    *(("presence_penalty", value) for value in (-2.1, 2.1, math.nan, "no")),
    *(("frequency_penalty", value) for value in (-2.1, 2.1, math.inf, [])),
    *(("repetition_penalty", value) for value in (0, -1, math.nan, 1e9)),
    *(("seed", value) for value in (1.5, "7", 1 << 64, True)),
    *(("max_tokens", value) for value in (0, -1, 1.5, "9", True)),
    *(("min_tokens", value) for value in (-1, 0.5, None)),
    *(("stop", value) for value in ("", [""], [3], ["a", None], 5, {"a": 1})),
    *(("stop_token_ids", value) for value in ([-1], [1.5], ["3"], [True], 5, "35", {5: 1})),
    *(("ignore_eos", value) for value in (1, "yes", None)),
    *(("logprobs", value) for value in (-1, 21, 1.5, True)),
    *(("logit_bias", value) for value in ({1: 101}, {1: math.nan}, {-1: 1}, {"x": 1}, {1: "a"}, [1], 5)),
    *(("response_format", value) for value in BAD_FORMATS),
]


@pytest.mark.parametrize(("name", "value"), BAD_PARAMS, ids=[f"{name}={value!r}" for name, value in BAD_PARAMS])
def test_an_invalid_sampling_value_is_refused_by_name(name: str, value: Any) -> None:
    assert name in refusal(lambda: SamplingParams(**{name: value}))


def test_min_tokens_above_max_tokens_is_refused() -> None:
    assert "min_tokens=9" in refusal(lambda: SamplingParams(max_tokens=8, min_tokens=9))


@pytest.mark.parametrize("name", ["ignore_eos", "min_tokens"])
def test_what_would_run_past_the_end_of_a_grammar_is_refused_beside_one(name: str) -> None:
    asked = {"ignore_eos": True, "min_tokens": 3}
    assert name in refusal(lambda: SamplingParams(response_format={"type": "json_object"}, **{name: asked[name]}))


GOOD_PARAMS: dict[str, list[Any]] = {
    "temperature": [0, 0.0, 2.5], "top_p": [1, 1e-9], "top_k": [-1, 0, 1, 10**6], "min_p": [0, 1],
    "presence_penalty": [-2, 2], "frequency_penalty": [-2.0, 2.0], "repetition_penalty": [0.1, 1.5],
    "seed": [None, 0, -1, (1 << 63) - 1], "max_tokens": [None, 1], "min_tokens": [0, 3],
    "stop": [(), None, "a", ["a", "b"]],
    "stop_token_ids": [(), None, [0, 5]], "ignore_eos": [True], "logprobs": [None, 0, 20],
    "logit_bias": [None, {}, {"5": 100}, {5: -100}],
    "response_format": [None, {"type": "text"}, {"type": "json_object"}, {"type": "regex", "regex": "a|b"},
                        {"type": "grammar", "grammar": "start: \"a\""},
                        {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {}}}],
}  # fmt: skip


def test_negative_control_values_at_the_limits_are_accepted() -> None:
    assert set(GOOD_PARAMS) == set(SamplingParams.__dataclass_fields__)
    for name, values in GOOD_PARAMS.items():
        for value in values:
            SamplingParams(**{name: value})


BAD_SETTINGS: list[tuple[str, Any]] = [
    *(("device", value) for value in ("tpu", "cuda:99", "cpu:x", "", 3)),
    *(("dtype", value) for value in ("float64", "int8", "", None)),
    *(("context_length", value) for value in (0, 1, -5, 1.5, "64", 513, True)),
    *(("prefix_cache_bytes", value) for value in (-1, 0.5, None)),
    *(("prefill_chunk", value) for value in (0, -1, 2.5, None)),
    *(("threads", value) for value in (0, -1, "all", True)),
    *(("drafter", value) for value in ("medusa", "", None)),
    *(("draft_width", value) for value in (0, 16, "wide", 1.5)),
    ("temperature", 0.5),
    ("n_ctx", 64),
]


@pytest.mark.parametrize(("name", "value"), BAD_SETTINGS, ids=[f"{name}={value!r}" for name, value in BAD_SETTINGS])
def test_an_engine_setting_that_cannot_be_had_is_refused_by_name(name: str, value: Any) -> None:
    assert name in refusal(lambda: llms.fresh("llama", settings={name: value}))


@pytest.mark.parametrize("model", ["", "no/such/folder/here", "nowhere.gguf"])
def test_a_model_that_is_not_there_is_refused_by_name(model: str) -> None:
    assert (model or "model") in refusal(lambda: LLM(model))


BAD_REQUESTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty": ([], {}, "prompt"),
    "too long for one more token": ([1] * 64, {}, "64 tokens"),
    "far too long": ([1] * 5000, {}, "context_length"),
    "id above the vocabulary": ([1, 101], {}, "101"),
    "negative id": ([1, -1], {}, "-1"),
    "id that is a float": ([1, 2.0], {}, "2.0"),
    "id that is a bool": ([1, True], {}, "True"),
    "text and ids mixed": ([1, "two"], {}, "two"),
    "messages and ids mixed": ([{"role": "user", "content": "hi"}, 1], {}, "prompt"),
    "several texts": (["one", "two"], {}, "list of texts"),
    "bytes, which list numbers": (b"\x01\x02", {}, "bytes"),
    "ids without an order": ({1, 2}, {}, "set"),
    "a mapping": ({"prompt": [1]}, {}, "dict"),
    "an array of fractions": (torch.tensor([1.5]), {}, "1.5"),
    "several arrays": (torch.ones(2, 3, dtype=torch.int64), {}, "[1, 1, 1]"),
    "no prompt": (None, {}, "prompt"),
    "a number": (5, {}, "prompt"),
    "text without a tokenizer": ("hello", {}, "tokenizer"),
    "messages without a tokenizer": ([{"role": "user", "content": "hi"}], {}, "tokenizer"),
    "stop string without a tokenizer": ([1, 2], {"stop": "x"}, "stop"),
    "stop id outside the vocabulary": ([1, 2], {"stop_token_ids": [101]}, "stop_token_ids"),
    "bias outside the vocabulary": ([1, 2], {"logit_bias": {101: 1.0}}, "logit_bias"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_request_is_refused_and_the_next_answer_is_that_of_a_fresh_engine(kind: str) -> None:
    llm = llms.shared(kind)
    for what, (prompt, params, named) in BAD_REQUESTS.items():
        message = refusal(lambda prompt=prompt, params=params: llm.generate(prompt, SamplingParams(**params)))
        assert named in message, (what, message)
        assert llm.generate(PROMPT, GREEDY).token_ids == llms.greedy_ids(kind), what


def test_params_of_another_type_are_refused() -> None:
    llm = llms.shared("llama")
    assert "SamplingParams" in refusal(lambda: llm.generate(PROMPT, {"max_tokens": 3}))  # type: ignore[arg-type]


def test_an_llm_says_that_it_cannot_travel() -> None:
    llm = llms.shared("llama")
    for way in (pickle.dumps, copy.copy, copy.deepcopy):
        assert "process" in refusal(lambda way=way: way(llm))
    out = llm.generate(PROMPT, GREEDY)
    assert pickle.loads(pickle.dumps(out)) == out and copy.deepcopy(GREEDY) == GREEDY


@pytest.mark.parametrize("ids", [[], [101], [-1], [1] * 65, ["a"], "a", None, 5])
def test_bad_ids_for_logits_are_refused(ids: Any) -> None:
    llm = llms.shared("llama")
    refusal(lambda: llm.logits(ids))
    assert llm.generate(PROMPT, GREEDY).token_ids == llms.greedy_ids("llama")


def test_a_request_that_fills_the_context_exactly_is_served() -> None:
    llm = llms.shared("llama")
    out = llm.generate([1] * 63, SamplingParams(temperature=0, ignore_eos=True))
    assert (len(out.token_ids), out.finish_reason) == (1, "length")
    assert llm.logits([1] * 64).shape == (64, 101)


def test_a_closed_model_says_so() -> None:
    llm = llms.fresh("llama")
    assert llm.generate(PROMPT, GREEDY).token_ids == llms.greedy_ids("llama")
    llm.close()
    llm.close()
    for use in (lambda: llm.generate(PROMPT, GREEDY), lambda: llm.logits(PROMPT), lambda: llm.stream(PROMPT)):
        assert "closed" in refusal(use)
