"""The built-in model through the Python API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from soloist import LLM, SamplingParams
from soloist.llm import Prompt
from soloist.ops.op import Op, observed

PROMPTS: tuple[Prompt, ...] = (
    "PostgreSQL indexes can be",
    [{"role": "user", "content": "Ada has 17 apples and buys 25 more. How many apples does Ada have now?"}],
)


def answers(llm: LLM, temperature: float) -> list[tuple[list[int], str]]:
    asked = SamplingParams(temperature=temperature, seed=3, max_tokens=24)
    return [(out.token_ids, out.text) for out in (llm.generate(prompt, asked) for prompt in PROMPTS)]


@cache
def expected(temperature: float) -> list[tuple[list[int], str]]:
    return answers(LLM(context_length=256), temperature)


@pytest.mark.parametrize("width", ["auto", 3])
@pytest.mark.parametrize("drafter", ["ngram", "mtp", "dspark"])
def test_text_does_not_depend_on_the_drafter(drafter: str, width: int | str) -> None:
    with LLM(drafter=drafter, draft_width=width, context_length=256) as llm:
        for temperature in (0.0, 0.7, 1.0):
            assert answers(llm, temperature) == expected(temperature)


def test_negative_control_another_seed_writes_another_text() -> None:
    with LLM(context_length=256) as llm:
        out = llm.generate(PROMPTS[0], SamplingParams(temperature=1.0, seed=4, max_tokens=24))
    assert (out.token_ids, out.text) != expected(1.0)[0]


def test_nano_can_add_two_numbers_of_its_templates() -> None:
    assert "42" in LLM().generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=40)).text


def test_prompt_and_rounds_call_the_ops_that_have_kernels_for_them() -> None:
    """A prompt that bypassed its op once took the reference on a GPU, ten times as slow and without a word."""
    called = set()

    @contextmanager
    def noted(each: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        called.add(each.name)
        yield

    with LLM(context_length=256) as llm, observed("cpu", noted):
        llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=1))
        assert called >= {"kda_prefill", "mla_prefill", "moe"} and not called & {"kda_decode", "mla_round"}
        llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=3))
        assert called >= {"kda_decode", "mla_round", "finish_round"}
