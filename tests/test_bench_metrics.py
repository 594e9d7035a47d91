"""Metrics, statistics and records: every number equals the one computed by hand."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest

from soloist.bench.decode import from_dict
from soloist.bench.files import read_run, request_lines, rounds_path
from soloist.bench.flags import flags_table
from soloist.bench.machine import Conditions
from soloist.bench.metrics import METRICS, acceptance_places, definitions_table
from soloist.bench.recording import Place, record_events
from soloist.bench.records import Block, Card, Flag, RequestRecord, RoundBytes
from soloist.bench.schema import schema_document
from soloist.bench.stats import distribution, ratio, sign_flip_p, trend_percent
from soloist.bench.summarise import summarise
from soloist.bench.target import Ending, Event
from soloist.errors import UserError
from tests.bench_runs import CARD, noisy_run, record, run_of

PLACE = Place("plain", "chat", "chat", 0, 0, 0.0)
EVENTS = [
    Event(2.0),  # a role, no block
    Event(10.0, (1,), 1, "a", server_ms=9.0),
    Event(30.0, (2, 3, 4, 5), 4, "b", drafted=3, accepted=3, round_ms=18.0),
    Event(37.0, (6, 7), 2, "", drafted=3, accepted=1, round_ms=6.0),
    Event(67.0, (8, 9, 10, 11, 12, 13, 14), 7, "c", drafted=7, accepted=6, round_ms=29.0, server_ms=61.0),
    Event(70.0, ending=Ending("length", 5, 14, "engine", 0)),
]


def observed(events: list[Event] = EVENTS) -> RequestRecord:
    return record_events(events, PLACE).record


BY_HAND = {
    "ttft_ms": 10.0,
    "first_text_ms": 10.0,
    "first_answer_ms": 10.0,
    "tpot_ms": 57 / 13,
    "server_tpot_ms": 52 / 13,
    "e2e_ms": 70.0,
    "request_decode_tok_s": 13000 / 57,
    "request_tok_s": 200.0,
    "prefill_tok_s": 500.0,
    "request_acceptance_length": 13 / 3,
    "output_tokens": 14,
    "regret": None,
    "block_gap_ms": [20.0, 7.0, 30.0],
    "tokens_per_block": [4.0, 2.0, 7.0],
    "token_time_ms": [5.0, 3.5, 30 / 7],
    "round_ms": [18.0, 6.0, 29.0],
    "host_gap_ms": [2.0, 1.0, 1.0],
    "total_tok_s": (14000.0, 70.0),
    "total_decode_tok_s": (13000.0, 57.0),
    "acceptance_length": (13.0, 3.0),
    "accepted_share": (10, 13),
    "drafted_per_round": (13, 3),
    "total_prefill_tok_s": (5000.0, 10.0),
    "energy_j_per_token": None,
}


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_has_its_hand_computed_value(name: str) -> None:
    found = METRICS[name].of(observed())
    assert found == (BY_HAND[name] if BY_HAND[name] is None else pytest.approx(BY_HAND[name]))


def test_acceptance_by_place_leaves_out_what_the_end_hides() -> None:
    """Rounds accept 3 of 3, 1 of 3 and, cut by the end, 6 of 7: the seventh draft of the last was never judged."""
    assert acceptance_places(observed()) == [(3, 3), (2, 3), (2, 2), (1, 1), (1, 1), (1, 1)]
    assert summarise([observed()], CARD.variants[1]).tried_at == (3, 3, 2, 1, 1, 1)


def test_two_events_of_one_packet_are_one_block() -> None:
    events = [Event(10.0, (1,), 1, "a"), Event(10.0, (2,), 1), Event(20.0, (3,), 1), Event(20.0, (4,), 1),
              Event(20.0, ending=Ending("stop", 5, 4, "token ids"))]  # fmt: skip
    found = observed(events)
    assert found.first_tokens == 2 and METRICS["tpot_ms"].of(found) == 5.0
    assert METRICS["block_gap_ms"].of(found) == [10.0] and METRICS["tokens_per_block"].of(found) == [2.0]


def test_reasoning_is_text_but_no_answer() -> None:
    events = [Event(5.0, (1,), 1, "hm", True), Event(9.0, (2,), 1, "yes"), Event(9.0, ending=Ending("stop", 1, 2, "usage"))]
    assert (observed(events).first_text_ms, observed(events).first_answer_ms) == (5.0, 9.0)


def test_without_the_servers_count_there_is_no_rate() -> None:
    events = [Event(5.0, text="a"), Event(9.0, text="b"), Event(9.0, ending=Ending("stop"))]
    found = observed(events)
    rates = ("tpot_ms", "request_tok_s", "request_decode_tok_s", "total_tok_s", "total_decode_tok_s", "acceptance_length")
    assert all(METRICS[name].of(found) is None for name in rates)
    assert METRICS["ttft_ms"].of(found) == 5.0 and METRICS["block_gap_ms"].of(found) == [4.0]


def test_an_answer_that_breaks_off_is_an_error() -> None:
    assert observed(EVENTS[:-1]).error is not None and observed([]).error is not None
    assert observed().error is None


def test_a_shift_in_time_changes_no_summary() -> None:
    shifted = [dataclasses.replace(r, at_s=r.at_s + 0.5) for r in noisy_run(1).requests]
    assert summarise(shifted, CARD.variants[0]) == summarise(noisy_run(1).requests, CARD.variants[0])


def test_mean_of_ratios_and_ratio_of_sums_are_two_numbers() -> None:
    requests = [record(0, tpot_ms=10.0), record(1, tpot_ms=30.0)]
    found = summarise(requests, CARD.variants[0])
    assert found.distributions["request_decode_tok_s"].mean == pytest.approx((100 + 1000 / 30) / 2)
    assert found.ratios["total_decode_tok_s"].value == pytest.approx(50.0)


def test_percentiles_and_extremes() -> None:
    found = distribution([[float(v)] for v in range(101)])
    assert found is not None
    assert (found.mean, found.median, found.p90, found.p99, found.min, found.max, found.n) == (50, 50, 90, 99, 0, 100, 101)
    assert distribution([[], []]) is None and ratio([]) is None


def test_one_request_has_no_interval() -> None:
    alone, quotient = distribution([[1.0, 2.0, 3.0]]), ratio([(3.0, 2.0)])
    assert alone is not None and (alone.mean, alone.low, alone.high) == (2.0, None, None)
    assert quotient is not None and (quotient.value, quotient.low, quotient.high) == (1.5, None, None)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng, hits = random.Random(3), 0
    for _ in range(100):
        found = distribution([[rng.gauss(7, 2)] for _ in range(40)])
        assert found is not None
        assert found.low is not None and found.high is not None
        hits += found.low <= 7 <= found.high
    assert 86 <= hits <= 100


def test_the_interval_is_over_requests_not_blocks() -> None:
    """A request of a thousand equal blocks says no more than one of ten."""
    short = distribution([[1.0] * 10, [2.0] * 10, [3.0] * 10])
    long = distribution([[1.0] * 1000, [2.0] * 1000, [3.0] * 1000])
    assert short is not None and long is not None
    assert (short.low, short.high) == (long.low, long.high)


def test_sign_flips_are_exact_for_few_pairs() -> None:
    assert sign_flip_p(np.array([1.0] * 6)) == 2 / 64
    assert sign_flip_p(np.array([1.0, -1.0] * 4)) == 1.0
    assert sign_flip_p(np.ones(40)) < 0.001


def test_a_trend_is_found_in_percent() -> None:
    found = trend_percent(list(range(50)), [10 + 0.02 * t for t in range(50)])
    assert found is not None and found[0] == pytest.approx(9.8) and found[1] > 9 and found[2] < 11
    assert trend_percent([1, 2], [1, 2]) is None


def test_the_share_of_the_limit_is_the_time_of_the_bytes_over_the_time() -> None:
    """Two rounds: 3 drafts behind 11 tokens, 1000 + 10 * 11 bytes; none behind 14, 400 + 10 * 14. At 1 kB a second."""
    blocks = (Block(50.0, 1), Block(2050.0, 3, 3, 2), Block(3300.0, 1, 0, 0))
    request = dataclasses.replace(record(), prompt_tokens=10, output_tokens=5, last_ms=3300.0, blocks=blocks)
    moved = (RoundBytes(0, 400, 10, None), RoundBytes(3, 1000, 10, 9.0))
    found = summarise([request], CARD.variants[1], moved, 1000.0)
    assert found.share_of_limit == pytest.approx((1.110 + 0.540) / 3.250) and found.round_bytes == moved
    assert summarise([request], CARD.variants[1], moved[:1], 1000.0).share_of_limit is None
    assert summarise([request], CARD.variants[1], moved).share_of_limit is None


def test_drift_does_not_mistake_hard_prompts_for_it() -> None:
    rising = [record(p, r, 10.0 + p) for r in range(3) for p in range(8)]
    found = summarise(rising, CARD.variants[0]).drift_percent
    assert found is not None and abs(found[0]) < 1e-6
    once = summarise(rising[:8], CARD.variants[0])
    assert once.drift_percent is None
    slower = [dataclasses.replace(r, last_ms=(r.last_ms or 0) + 5 * r.at_s) for r in rising]
    drifted = summarise(slower, CARD.variants[0]).drift_percent
    assert drifted is not None and drifted[0] > 50


def test_a_run_comes_back_from_its_files_as_it_was(tmp_path: Path) -> None:
    run = run_of((observed(), record(1), observed()))
    run.write(tmp_path / "a.json")
    assert [r.blocks for r in read_run(tmp_path / "a.json").requests] == [(), (), ()]
    lines = "".join(line for i, r in enumerate(run.requests) for line in request_lines(i, r))
    rounds_path(tmp_path / "a.json").write_text(lines)
    assert read_run(tmp_path / "a.json") == run
    assert len(lines.splitlines()) == 8 + 3 and run.requests[0].blocks[1] == Block(30.0, 4, 3, 3, 18.0)


@pytest.mark.parametrize("content, said", [
    ("", "is not valid JSON"), ("[]", "is not a benchmark run"), ('{"schema_version": 99}', "schema version 99"),
    ('{"schema_version": 1}', "soloist is missing"),
])  # fmt: skip
def test_files_that_are_no_runs_are_refused_in_a_sentence(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError, match=said):
        read_run(tmp_path / "x.json")


def test_reading_is_strict() -> None:
    good = json.loads(json.dumps(dataclasses.asdict(CARD)))
    assert from_dict(Card, good, "x") == CARD
    for change, said in (
        ({"repeets": 3}, "did you mean repeats"), ({"repeats": True}, "a whole number"), ({"seed": "1"}, "a whole number"),
        ({"workloads": [{"name": "a"}]}, "prompts is missing"), ({"workloads": 3}, "must be a list"),
        ({"settings": 3}, "must be a table"), ({"model": None}, "must be text"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            from_dict(Card, {**good, **change}, "x")


def test_definitions_in_the_docs_are_those_of_the_code() -> None:
    text = (Path(__file__).parents[1] / "docs" / "measurement.md").read_text()
    assert definitions_table() in text
    assert flags_table() in text


def test_the_schema_in_the_docs_is_that_of_a_runs_file() -> None:
    """Every key that the file of a run has is in the document's table of its kind, and no other."""
    folder = Path(__file__).parents[1]
    document = (folder / "docs" / "run-file.md").read_text()
    assert document == schema_document()
    tables = {part.split("\n")[0]: set(re.findall(r"^\| `(\w+)` \|", part, re.M)) for part in document.split("\n## ")}
    run = dataclasses.replace(run_of((observed(), record(1))), conditions=(Conditions(None).read(),), flags=(Flag("cold", ""),))
    content = json.loads(json.dumps(dataclasses.asdict(run)))
    kinds = {
        "RunFile": [content], "Card": [content["card"]], "Workload": content["card"]["workloads"], "Flag": content["flags"],
        "Variant": content["card"]["variants"], "Machine": [content["machine"]], "Condition": content["conditions"],
        "RequestRecord": content["requests"], "Block": content["requests"][0]["blocks"], "Summary": content["summaries"],
        "Distribution": list(content["summaries"][0]["distributions"].values()),
        "Ratio": list(content["summaries"][0]["ratios"].values()),
    }  # fmt: skip
    for kind, found in kinds.items():
        assert found and all(set(each) == tables[kind] for each in found), kind
