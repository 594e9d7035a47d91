"""The text does not depend on the drafter: not on its kind, width, acceptance, nor on anything a request asks for."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
import torch

from soloist.config import SamplingParams
from soloist.drafters.drafter import NoDraft
from soloist.drafters.width import AutoWidth
from soloist.ops import accept as accept_op
from soloist.ops import finish_round as finish_module
from soloist.runtime.engine import Engine, Request
from soloist.runtime.runner import TokenLogprobs
from soloist.state.buffers import Buffers
from tests import models, speculate
from tests.speculate import DRAFTERS, PROMPT, V, engine, plain, run, tokens
from tests.test_windows import assert_same_state

KINDS = list(models.CONFIGS)
NAMES = list(DRAFTERS)
LENGTH = 28


def params(temperature: float = 0.0, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": temperature, "seed": 11, "max_tokens": LENGTH, **more})


TEMPERATURES = (0.0, 0.7, 1.0)


def check_text(kind: str, temperature: float, drafted: Iterable[tuple[str, int]]) -> None:
    """The text is that of plain decoding for these drafters and widths."""
    asked = params(temperature)
    answer = plain(kind, asked)
    assert len(answer) == LENGTH
    for name, width in drafted:
        assert tokens(run(engine(kind, DRAFTERS[name](answer, width)), asked)) == answer, (name, width)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("kind", KINDS)
def test_text_does_not_depend_on_the_drafter_or_its_width(kind: str, temperature: float) -> None:
    """Every width of a family at one of the temperatures, the drafters in turn."""
    widths = range(1 + TEMPERATURES.index(temperature), 16, len(TEMPERATURES))
    check_text(kind, temperature, ((NAMES[(width + len(kind)) % len(NAMES)], width) for width in widths))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("kind", KINDS)
def test_text_does_not_depend_on_any_drafter_at_any_width(kind: str, temperature: float) -> None:
    check_text(kind, temperature, product(NAMES, range(1, 16)))


@pytest.mark.parametrize("name", NAMES)
def test_text_does_not_depend_on_any_width_of_any_drafter(name: str) -> None:
    asked = params(0.9, top_p=0.95)
    answer = plain("qwen3", asked)
    for width in range(1, 16):
        assert tokens(run(engine("qwen3", DRAFTERS[name](answer, width)), asked)) == answer, width


@pytest.mark.parametrize("name", NAMES)
def test_text_does_not_depend_on_how_the_width_is_chosen(name: str) -> None:
    asked = params(0.7, max_tokens=90)
    answer = plain("llama", asked)
    for _ in range(2):  # the second request starts with the costs that the first measured
        drafter = DRAFTERS[name](answer, 15)
        served = engine("llama", drafter, AutoWidth(15, refresh=5))
        assert tokens(run(served, asked)) == answer
        assert tokens(run(served, asked)) == answer


REQUESTS: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.9, "repetition_penalty": 1.3},
    "encouraged": {"frequency_penalty": -1.0},
    "bias": {"logit_bias": {3: 4.0, 17: -100.0}},
    "min_tokens": {"min_tokens": 19, "stop_token_ids": list(range(0, V, 3))},
    "truncated": {"temperature": 1.0, "top_k": 12, "top_p": 0.8, "min_p": 0.02},
    "all": {"temperature": 1.1, "top_p": 0.9, "frequency_penalty": 0.4, "repetition_penalty": 1.1, "min_tokens": 9,
            "stop_token_ids": [5, 50, 71], "logit_bias": {5: 1.0}},
}  # fmt: skip


@pytest.mark.parametrize(
    "kind, request_name", [*(("qwen3", name) for name in REQUESTS), ("ling-tiny", "all"), ("llama-dynamic", "all")]
)
def test_every_parameter_gives_the_result_of_plain_decoding(kind: str, request_name: str) -> None:
    asked = params(**{"temperature": 0.7, **REQUESTS[request_name]})
    answer = plain(kind, asked)
    assert answer != plain(kind, params(0.7)), "the parameter has no effect, so the test would show nothing"
    for name in NAMES:
        for width in (1, 4, 15):
            assert tokens(run(engine(kind, DRAFTERS[name](answer, width)), asked)) == answer, (name, width)


def test_an_end_inside_a_block_is_that_of_plain_decoding() -> None:
    """max_tokens at every residue, and every token of the answer as the stop token or end of text."""
    answer = plain("llama", params())
    drafters = {name: engine("llama", DRAFTERS[name](answer, 7)) for name in ("oracle", "mixed")}
    for end in range(1, 18):
        for name, served in drafters.items():
            found = run(served, params(max_tokens=end))
            assert tokens(found) == answer[:end] and found[-1].done == accept_op.FULL, (name, end)
    distinct = params(0.9)
    answer = plain("llama", distinct)
    for name in drafters:
        served = engine("llama", DRAFTERS[name](answer, 7))
        for end in range(LENGTH):
            stop = answer[end]
            expected = answer[: answer.index(stop) + 1]
            by_id = run(served, params(0.9, stop_token_ids=[stop]))
            by_eos = run(served, params(0.9), eos=(stop,))
            for found in (by_id, by_eos):
                assert tokens(found) == expected and found[-1].done == accept_op.STOPPED, (name, end)
            assert tokens(run(served, params(0.9, ignore_eos=True), eos=(stop,))) == answer


def logprobs(served: Engine, asked: SamplingParams) -> list[TokenLogprobs]:
    return [each for result in run(served, asked) for each in result.logprobs or ()]


@pytest.mark.parametrize("kind", ["qwen3-moe", "llama"])
def test_logprobs_are_those_of_plain_decoding(kind: str) -> None:
    asked = params(0.8, logprobs=3)
    answer = plain(kind, asked)
    expected = logprobs(speculate.plain_engine(kind), asked)
    assert [each.token_id for each in expected] == answer
    for name in NAMES:
        assert logprobs(engine(kind, DRAFTERS[name](answer, 5)), asked) == expected, name


def test_different_seeds_give_different_texts_and_the_same_seed_the_same() -> None:
    texts = {tuple(plain("llama", params(1.0, seed=seed))) for seed in range(6)}
    assert len(texts) == 6
    answer = plain("llama", params(1.0, seed=3))
    served = engine("llama", DRAFTERS["ngram"](answer, 4))
    run(served, params(1.0, seed=8))
    assert tokens(run(served, params(1.0, seed=3))) == answer


def test_a_request_broken_off_leaves_nothing_behind() -> None:
    asked = params(0.7)
    answer = plain("ling-flash", asked)
    served = engine("ling-flash", DRAFTERS["mixed"](answer, 6))
    for rounds in range(4):
        broken = served.run(Request(PROMPT[:9], (), params(1.0, seed=rounds)))
        for _ in range(rounds):
            next(broken)
        broken.close()  # type: ignore[attr-defined]
        assert tokens(run(served, asked)) == answer


def test_the_end_of_the_context_is_reached_exactly_at_every_width() -> None:
    prompt = tuple(models.ids(speculate.CONTEXT - 21, seed=4).tolist())
    asked = params(0.7, max_tokens=None)
    answer = plain("llama", asked, prompt)
    assert len(answer) == 21
    for width in (1, 6, 15):
        assert tokens(run(engine("llama", DRAFTERS["oracle"](answer, width)), asked, prompt)) == answer


@pytest.mark.parametrize("kind", KINDS)
def test_oracle_is_accepted_at_every_depth(kind: str) -> None:
    asked = params(0.7, max_tokens=1 + 3 * 16)
    answer = plain(kind, asked)
    for width in (1, 2, 7, 15):
        rounds = run(engine(kind, DRAFTERS["oracle"](answer, width)), asked)[1:]
        assert all(len(result.tokens) == width + 1 for result in rounds[:-1]), width
        assert tokens(rounds) == answer[1:]


@pytest.mark.parametrize("kind", KINDS)
def test_always_wrong_gives_one_token_a_round_and_the_state_of_plain_decoding(kind: str) -> None:
    asked = params(0.7, max_tokens=24)
    answer = plain(kind, asked)
    straight, drafted = engine(kind, NoDraft()), engine(kind, DRAFTERS["wrong"](answer, 5))
    request = Request(PROMPT, (), asked)
    for index, (left, right) in enumerate(zip(straight.run(request), drafted.run(request), strict=True)):
        assert left is not None and right is not None and left.tokens == right.tokens
        if index == 0:
            continue  # the first token arrives before the prompt's last chunk is committed
        assert_same_state(straight.parts.sequence, drafted.parts.sequence)
        for name in ("anchor", "emitted", "budget", "counts"):
            assert torch.equal(getattr(straight.parts.bufs, name), getattr(drafted.parts.bufs, name)), name


@pytest.mark.parametrize("kind", ["ling-flash", "llama"])
def test_negative_control_a_commit_that_keeps_too_much_changes_the_text(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = params(0.7)
    answer = plain(kind, asked)
    right = Buffers.finish

    def keeps_all(self: Buffers, *given: Any) -> torch.Tensor:
        report = right(self, *given)
        length, live, slots = next(each for each in given if isinstance(each, tuple) and len(each) == 3)
        live.add_(report[:1] > 1).remainder_(slots)
        length.add_(report[:1] > 1)
        return report

    monkeypatch.setattr(Buffers, "finish", keeps_all)
    assert tokens(run(engine(kind, DRAFTERS["mixed"](answer, 5)), asked)) != answer


def test_negative_control_an_acceptance_one_too_long_changes_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = params(0.7)
    answer = plain("llama", asked)

    def generous(picks: Any, window: Any, *rest: Any) -> Any:
        n, done = accept_op.accept(picks, window, *rest)
        return (n + 1).clamp_max(len(picks)), done

    monkeypatch.setattr(finish_module, "accept", generous)
    assert tokens(run(engine("llama", DRAFTERS["mixed"](answer, 5)), asked)) != answer
