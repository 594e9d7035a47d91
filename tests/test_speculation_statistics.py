"""The statistics of a request are those of the tokens it emitted."""

from __future__ import annotations

import pytest

from soloist.config import SamplingParams
from soloist.drafters.width import AutoWidth, FixedWidth, WidthChoice
from soloist.ops.accept import FULL, RUNNING, STOPPED
from soloist.runtime.runner import RoundResult
from soloist.runtime.statistics import RequestClock, Timings
from tests.speculate import DRAFTERS, PATTERN, engine, plain, run


def measured(results: list[RoundResult], widths: WidthChoice, used: list[int] | None = None) -> Timings:
    clock = RequestClock(widths)
    clock.prefilled()
    for index, result in enumerate(results):
        clock.round(result, len(result.tokens) if used is None else used[index])
    return clock.timings()


def result(emitted: int, drafted: int, done: int = RUNNING) -> RoundResult:
    return RoundResult(list(range(emitted)), None, drafted, drafted, done, 1.0, None)


def test_every_figure_of_a_small_request_by_hand() -> None:
    times = measured([result(4, 3), result(1, 3), result(3, 3), result(1, 0), result(2, 5, STOPPED)], FixedWidth(3))
    assert times.rounds == 5 and times.acceptance_length == pytest.approx(11 / 5)
    assert times.accepted_histogram == [0, 2, 1, 1, 1]
    assert times.drafted == 14 and times.verified == 19
    assert times.width_histogram == [1, 0, 0, 3, 0, 1]
    # Place 1 was judged in four rounds (the stop round accepted one draft), place 2 in two, place 3 in two.
    assert times.acceptance_rates == pytest.approx([3 / 4, 2 / 2, 1 / 2])
    assert times.plain_round_ms is None and times.speedup is None


def test_a_stop_string_inside_a_block_cuts_the_length_but_not_the_rates() -> None:
    times = measured([result(4, 3), result(4, 3)], FixedWidth(3), used=[4, 2])
    assert times.acceptance_length == 3.0 and times.accepted_histogram == [0, 0, 1, 0, 1]
    assert times.acceptance_rates == [1.0, 1.0, 1.0]


def test_a_request_of_one_token_has_no_rounds() -> None:
    times = measured([], FixedWidth(3))
    assert (times.rounds, times.acceptance_length, times.tpot_ms, times.speedup) == (0, None, None, None)
    assert times.accepted_histogram == [0] and times.acceptance_rates == []


@pytest.mark.parametrize("name", ["oracle", "wrong", "mixed"])
def test_statistics_of_real_rounds_show_the_acceptance_that_was_pinned(name: str) -> None:
    asked = SamplingParams(temperature=0.7, seed=2, max_tokens=61)
    answer = plain("llama", asked)
    results = run(engine("llama", DRAFTERS[name](answer, 5)), asked)
    times = measured(results[1:], FixedWidth(5))
    assert sum(k * rounds for k, rounds in enumerate(times.accepted_histogram)) == 60
    assert times.verified == 6 * times.rounds and results[-1].done == FULL
    # The identity between the rates and the length; the last round may be cut.
    survival, expected = 1.0, 1.0
    for rate in times.acceptance_rates:
        survival *= rate
        expected += survival
    assert times.acceptance_length == pytest.approx({"oracle": 6.0, "wrong": 1.0}.get(name, expected), abs=0.25)
    if name == "mixed":
        assert 1.5 < expected < 1 + 5 * sum(PATTERN) / len(PATTERN)


def test_speedup_is_measured_against_plain_rounds_of_the_same_engine() -> None:
    asked = SamplingParams(temperature=0.7, seed=2, max_tokens=100)
    answer = plain("qwen3", asked)
    widths = AutoWidth(15)
    results = run(engine("qwen3", DRAFTERS["oracle"](answer, 15), widths), asked)
    times = measured(results[1:], widths)
    assert times.width_histogram[0] >= 1 and times.plain_round_ms == widths.plain_ms
    assert times.plain_round_ms is not None and times.plain_round_ms > 0 and times.speedup is not None
    assert times.speedup == pytest.approx(times.plain_round_ms * 99 / (times.decode_s * 1e3))
