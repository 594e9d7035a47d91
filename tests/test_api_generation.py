"""Laws of a request: what ends it, what streaming changes (nothing), and what the request before changes (nothing)."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from soloist import LLM, SamplingParams
from soloist.llm import Output, StreamEvent
from tests import llms
from tests.llms import GREEDY, PROMPT

KINDS = ("ling-flash", "llama", "llama-dynamic", "qwen3-moe")
LONG = SamplingParams(temperature=0.0, ignore_eos=True)


@pytest.fixture(params=KINDS)
def llm(request: pytest.FixtureRequest) -> LLM:
    return llms.shared(request.param)


def streamed(llm: LLM, params: SamplingParams) -> tuple[list[StreamEvent], Output]:
    events = list(llm.stream(PROMPT, params))
    output = events[-1].output
    assert output is not None
    return events, output


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=4, max_tokens=9, logprobs=2)], ids=["greedy", "seeded"])
def test_a_stream_brings_what_generate_returns(llm: LLM, params: SamplingParams) -> None:
    events, output = streamed(llm, params)
    whole = llm.generate(PROMPT, params)
    assert [token for event in events for token in event.token_ids] == output.token_ids == whole.token_ids
    assert "".join(event.text for event in events) == output.text == whole.text
    assert [one for event in events for one in event.logprobs or ()] == (whole.logprobs or [])
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason == whole.finish_reason == output.finish_reason


@pytest.mark.parametrize("kind", [tuple, iter, torch.tensor, np.array])
def test_ids_may_come_in_any_list_or_array(kind: Any) -> None:
    llm = llms.shared("llama")
    assert llm.generate(kind(PROMPT), GREEDY).token_ids == llms.greedy_ids("llama")


def test_usage_and_rounds_count_what_happened(llm: LLM) -> None:
    out = llm.generate(PROMPT, GREEDY)
    usage, timings = out.usage, out.timings
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 12, 19)
    assert (timings.rounds, timings.drafted, timings.verified) == (11, 0, 11)
    assert timings.accepted_histogram == [0, 11] and timings.ttft_ms > 0 and timings.tpot_ms > 0
    assert out.finish_reason == "length" and set(out.to_dict()) == set(Output.__dataclass_fields__)


def test_without_max_tokens_a_request_runs_to_the_end_of_the_context(llm: LLM) -> None:
    out = llm.generate(PROMPT, LONG)
    assert len(out.token_ids) == llm.plan.context_length - len(PROMPT)
    assert out.finish_reason == "length"


@pytest.mark.parametrize("index", [0, 1, 5])
def test_a_stop_id_ends_the_request_where_it_first_occurs(llm: LLM, index: int) -> None:
    ids = llms.greedy_ids(kind_of(llm))
    stop = ids[index]
    out = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop]))
    assert out.token_ids == ids[: ids.index(stop) + 1]
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)


def test_eos_ends_a_request_and_ignore_eos_does_not(llm: LLM) -> None:
    forced = {"temperature": 0, "max_tokens": 4, "logit_bias": {100: 100.0}}
    out = llm.generate(PROMPT, SamplingParams(**forced))
    assert (out.token_ids, out.finish_reason, out.stop_reason) == ([100], "stop", None)
    out = llm.generate(PROMPT, SamplingParams(**forced, ignore_eos=True))
    assert (out.token_ids, out.finish_reason) == ([100] * 4, "length")


@pytest.mark.parametrize("wanted", [1, 3, 6])
def test_no_stop_token_comes_before_min_tokens(llm: LLM, wanted: int) -> None:
    """With every logit pushed to the stop tokens, exactly the wanted number of others comes first."""
    biased = {"logit_bias": {100: 100.0, 7: 90.0}, "stop_token_ids": [7], "temperature": 0.0, "max_tokens": 10}
    out = llm.generate(PROMPT, SamplingParams(**biased, min_tokens=wanted))
    assert len(out.token_ids) == wanted + 1 and out.token_ids[-1] == 100
    assert not {7, 100} & set(out.token_ids[:-1])


def test_cancel_ends_a_request_after_its_current_round(llm: LLM) -> None:
    stream = llm.stream(PROMPT, LONG)
    before = [token for _ in range(3) for token in next(stream).token_ids]
    llm.cancel()
    rest = list(stream)
    assert len(rest) == 1 and rest[0].finish_reason == "cancelled" and rest[0].output is not None
    assert rest[0].output.token_ids == before == llm.generate(PROMPT, LONG).token_ids[:3]


def test_cancel_from_another_thread_ends_the_request(llm: LLM) -> None:
    events = []
    for event in llm.stream(PROMPT, LONG):
        events.append(event)
        if len(events) == 2:
            other = threading.Thread(target=llm.cancel)
            other.start()
            other.join()
    assert events[-1].finish_reason == "cancelled" and len(events) == 3


def test_a_cancel_between_requests_cancels_nothing(llm: LLM) -> None:
    llm.cancel()
    assert llm.generate(PROMPT, GREEDY).token_ids == llms.greedy_ids(kind_of(llm))


def test_the_same_request_gives_the_same_answer_after_any_other(llm: LLM) -> None:
    """Longer, shorter, sampled, penalised, cancelled, abandoned, refused: nothing is left behind."""
    sampled = SamplingParams(seed=11, max_tokens=12, ignore_eos=True)
    again = llm.generate(PROMPT, sampled).token_ids
    others = [
        lambda: llm.generate([3], LONG),
        lambda: llm.generate([9] * 60, GREEDY),
        lambda: llm.generate(PROMPT, SamplingParams(seed=1, max_tokens=5, presence_penalty=2, logit_bias={4: 100})),
        lambda: llm.generate(PROMPT, SamplingParams(max_tokens=5, min_tokens=5, stop_token_ids=[1], logprobs=3)),
        lambda: next(iter(llm.stream(PROMPT[::-1], LONG))),
        lambda: llm.logits([8] * 30),
        lambda: llm.stream(PROMPT, LONG).close(),
    ]
    for other in others:
        other()
        assert llm.generate(PROMPT, GREEDY).token_ids == llms.greedy_ids(kind_of(llm))
        assert llm.generate(PROMPT, sampled).token_ids == again


def test_requests_from_two_threads_take_turns(llm: LLM) -> None:
    answers: list[list[int]] = []
    callers = [threading.Thread(target=lambda: answers.append(llm.generate(PROMPT, GREEDY).token_ids)) for _ in "ab"]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert answers == [llms.greedy_ids(kind_of(llm))] * 2


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_does_not_depend_on_how_the_prompt_is_cut(kind: str, chunk: int) -> None:
    llm = llms.fresh(kind, settings={"prefill_chunk": chunk})
    assert llm.generate(PROMPT, GREEDY).token_ids == llms.greedy_ids(kind)


def test_a_dynamic_rope_model_runs_beyond_its_trained_positions() -> None:
    llm = llms.fresh("llama-dynamic", settings={"context_length": 256})
    assert llm.generate([1] * 200, GREEDY).usage.total_tokens == 212


def kind_of(llm: LLM) -> str:
    return next(kind for kind in KINDS if llms.shared(kind) is llm)
