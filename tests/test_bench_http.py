"""The client for OpenAI-compatible servers: known moments give every metric the value that a hand computes."""

from __future__ import annotations

from typing import Any

import pytest

from soloist.bench.http import HttpTarget, request_fields
from soloist.bench.metrics import METRICS
from soloist.bench.recording import Answer, Place, record_events
from soloist.bench.records import RequestRecord
from soloist.bench.target import Prompt
from soloist.errors import UserError
from tests.fake_server import FakeServer, Packets, chat_chunk, listening, sse, streamed, text_chunk, usage_chunk, whole

PROMPT = Prompt("p", "code", token_ids=(1, 2, 3))
TALK = Prompt("p", "chat", messages=({"role": "user", "content": "hi"},))
GREEDY = {"temperature": 0.0, "max_tokens": 128, "ignore_eos": True, "seed": 7, "top_k": 0, "stop": ()}
DONE = sse("[DONE]")
PLACE = Place("plain", "w", "code", 0, 0, 0.0)


def ask(*scripts: Packets, prompt: Prompt = PROMPT, started_ms: float = 0.0) -> Answer:
    server = FakeServer(*scripts, started_ms=started_ms)
    target = HttpTarget("http://fake:1", connect=server.connect, clock=server.clock)
    return record_events(target.serve(prompt, GREEDY), PLACE)


def value_of(record: RequestRecord, name: str) -> Any:
    value = METRICS[name].of(record)
    return value[0] / value[1] if isinstance(value, tuple) else value


def metrics(record: RequestRecord, *names: str) -> list[Any]:
    """Values to compare with numbers; only the last bits may differ."""
    return [None if (value := value_of(record, name)) is None else pytest.approx(value) for name in names]


# Blocks of 1, 4, 7 and 1 tokens at 100, 110, 130 and 131 ms; usage at 132, the end at 133.
BLOCKS = [(100.0, 1), (110.0, 4), (130.0, 7), (131.0, 1)]
EXPECTED = {
    "ttft_ms": 100.0,
    "first_text_ms": 100.0,
    "first_answer_ms": 100.0,
    "tpot_ms": 31 / 12,
    "e2e_ms": 133.0,
    "request_decode_tok_s": 12 / 0.031,
    "request_tok_s": 13 / 0.133,
    "prefill_tok_s": 3 / 0.1,
    "output_tokens": 13,
    "block_gap_ms": [10.0, 20.0, 1.0],
    "tokens_per_block": [4.0, 7.0, 1.0],
    "token_time_ms": [10 / 4, 20 / 7, 1.0],
    "total_tok_s": 13 / 0.133,
    "total_decode_tok_s": 12 / 0.031,
    "total_prefill_tok_s": 3 / 0.1,
}


def ids_script() -> Packets:
    events = [(t, sse(text_chunk("x" * n, token_ids=list(range(n))))) for t, n in BLOCKS]
    return streamed([*events, (132.0, sse(usage_chunk(3, 13))), (133.0, DONE)])


def usage_script() -> Packets:
    """Running sums in every chunk, as continuous_usage_stats gives them."""
    events, total = [], 0
    for t, n in BLOCKS:
        total += n
        events.append((t, sse(text_chunk("x" * n, usage={"prompt_tokens": 3, "completion_tokens": total}))))
    return streamed([*events, (132.0, sse(usage_chunk(3, 13))), (133.0, DONE)])


def timings_script() -> Packets:
    """llama-server's running sums, with the drafts among them and its own clock."""
    events, total = [], 0
    for t, n in BLOCKS:
        total += n
        timings = {"predicted_n": total, "draft_n": 8 * (total > 1), "draft_n_accepted": total - 1,
                   "prompt_ms": 90.0, "predicted_ms": t - 95.0}  # fmt: skip
        events.append((t, sse(text_chunk("x" * n, timings=timings))))
    return streamed([*events, (132.0, sse(usage_chunk(3, 13))), (133.0, DONE)])


@pytest.mark.parametrize("script", [ids_script, usage_script, timings_script])
def test_known_moments_give_the_values_that_a_hand_computes(script: Any) -> None:
    record = ask(script()).record
    assert record.error is None
    for name, value in EXPECTED.items():
        assert metrics(record, name) == [value], name
    assert record.count_source == ("token ids" if script is ids_script else "usage")


def test_a_shifted_clock_changes_no_metric() -> None:
    """Numbers that depend on where a second begins would differ: pitfall J9."""
    first, later = ask(ids_script()).record, ask(ids_script(), started_ms=123_500.0).record
    assert [b.n for b in first.blocks] == [b.n for b in later.blocks]
    for name in EXPECTED:
        assert metrics(first, name) == [value_of(later, name)]


def test_moments_that_differ_give_other_values() -> None:
    """Negative control: the last block 5 ms later."""
    moved = streamed([(t + 5 * (t == 131.0), sse(text_chunk("x" * n, token_ids=list(range(n))))) for t, n in BLOCKS]
                     + [(137.0, sse(usage_chunk(3, 13))), (138.0, DONE)])  # fmt: skip
    assert metrics(ask(moved).record, "tpot_ms") == [36 / 12]


def test_ids_of_the_answer_are_kept_in_order() -> None:
    assert ask(ids_script()).token_ids == (0, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 0)


def test_drafts_and_the_clock_of_the_server_are_read_where_it_tells_them() -> None:
    record = ask(timings_script()).record
    assert [(b.drafted, b.accepted) for b in record.blocks] == [(0, 0), (8, 4), (0, 7), (0, 1)]
    assert [b.server_ms for b in record.blocks] == [95.0, 105.0, 125.0, 126.0]


def test_a_role_is_no_token_and_reasoning_is_no_answer() -> None:
    events = [
        (5.0, sse(chat_chunk(role="assistant", content=""))),
        (50.0, sse(chat_chunk(reasoning_content="hmm"))),
        (60.0, sse(chat_chunk(reasoning="so"))),
        (70.0, sse(chat_chunk(content="yes"))),
        (71.0, sse(chat_chunk(finish="stop"))),
        (72.0, sse(usage_chunk(9, 4, prompt_tokens_details={"cached_tokens": 6}))),
        (73.0, DONE),
    ]
    record = ask(streamed(events), prompt=TALK).record
    assert metrics(record, "ttft_ms", "first_text_ms", "first_answer_ms", "e2e_ms") == [50.0, 50.0, 70.0, 73.0]
    assert record.cached_tokens == 6 and record.finish_reason == "stop"
    assert metrics(record, "prefill_tok_s") == [3 / 0.05]
    assert metrics(record, "tpot_ms") == [20 / 3]  # four tokens by usage, one in each chunk and the end of text


def test_a_chunk_that_ends_the_thought_counts_its_tokens_once() -> None:
    both = {**chat_chunk(reasoning_content="a", content="b"), "usage": {"prompt_tokens": 9, "completion_tokens": 3}}
    record = ask(streamed([(50.0, sse(both)), (51.0, DONE)]), prompt=TALK).record
    assert record.first_tokens == 3 and record.output_tokens == 3 and metrics(record, "first_answer_ms") == [50.0]


def test_events_of_one_packet_are_one_block() -> None:
    """Pitfall 7: neither a gap of zero nor a division by it."""
    events = [(t, sse(text_chunk("x", token_ids=[1]))) for t in (100.0, 120.0, 120.0, 120.0, 150.0)]
    record = ask(streamed([*events, (151.0, sse(usage_chunk(3, 5))), (151.0, DONE)])).record
    assert metrics(record, "block_gap_ms", "tokens_per_block", "token_time_ms", "tpot_ms") == [
        [20.0, 30.0], [3.0, 1.0], [20 / 3, 30.0], 50 / 4]  # fmt: skip


def test_an_event_in_two_packets_comes_with_the_second() -> None:
    event = sse(text_chunk("xy", token_ids=[1, 2]))
    record = ask(streamed([(100.0, event[:20]), (130.0, event[20:]), (140.0, sse(usage_chunk(3, 2)) + DONE)])).record
    assert metrics(record, "ttft_ms", "output_tokens") == [130.0, 2]


def test_text_that_is_held_back_still_counts_its_token() -> None:
    events = [(100.0, sse(text_chunk("", token_ids=[7]))), (110.0, sse(text_chunk("é", token_ids=[8]))), (111.0, DONE)]
    record = ask(streamed(events)).record
    assert metrics(record, "ttft_ms", "first_text_ms", "output_tokens") == [100.0, 110.0, 2]


def test_without_a_count_there_is_no_rate() -> None:
    """Pitfall J3: what was asked for is never reported as what came."""
    events = [(100.0 + t, sse(text_chunk("ab"))) for t in range(10)]
    record = ask(streamed([*events, (120.0, sse(text_chunk("", finish="stop"))), (121.0, DONE)])).record
    assert record.error is None and record.output_tokens is None and record.count_source is None
    assert metrics(record, "tpot_ms", "request_tok_s", "total_tok_s", "tokens_per_block") == [None, None, None, []]
    assert metrics(record, "ttft_ms", "e2e_ms") == [100.0, 121.0]


@pytest.mark.parametrize(
    ("chunks", "finish", "by_tokenizer", "source"),
    [
        (128, "length", None, "chunks = limit"),
        (128, "stop", None, None),
        (127, "length", None, None),
        (40, "stop", 40, "chunks = tokenizer"),
        (40, "stop", 80, None),
    ],
)  # fmt: skip
def test_chunks_are_tokens_only_where_a_second_witness_agrees(
    chunks: int, finish: str, by_tokenizer: int | None, source: str | None
) -> None:
    events = [(100.0 + t, sse(text_chunk("ab"))) for t in range(chunks)]
    server = FakeServer(streamed([*events, (300.0, sse(text_chunk("", finish=finish))), (300.0, DONE)]))
    count = None if by_tokenizer is None else lambda text: by_tokenizer
    target = HttpTarget("http://fake:1", connect=server.connect, clock=server.clock, count_text=count)
    record = record_events(target.serve(PROMPT, GREEDY), PLACE).record
    assert record.count_source == source and record.output_tokens == (chunks if source else None)
    assert metrics(record, "tpot_ms") == [1.0 if source else None]


def test_an_early_end_reports_the_tokens_that_came() -> None:
    events = [(100.0 + t, sse(text_chunk("ab"))) for t in range(9)]
    end = [(110.0, sse(text_chunk("", finish="stop"))), (111.0, sse(usage_chunk(3, 10))), (111.0, DONE)]
    record = ask(streamed(events + end)).record
    assert record.output_tokens == 10 and record.finish_reason == "stop"
    assert metrics(record, "tpot_ms") == [8 / 9]


def test_a_sum_at_the_end_says_nothing_of_blocks() -> None:
    """Nine chunks and 30 tokens: how many were in the first is unknown, and so is the decode time of a token."""
    events = [(100.0 + t, sse(text_chunk("ab"))) for t in range(9)]
    record = ask(streamed([*events, (111.0, sse(usage_chunk(3, 30))), (111.0, DONE)])).record
    assert record.output_tokens == 30 and metrics(record, "tpot_ms", "request_tok_s") == [None, 30 / 0.111]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (streamed([(100.0, sse(text_chunk("x", token_ids=[1])))]), "ended before the answer did"),
        (streamed([(100.0, sse({"error": {"message": "out of memory"}}))]), "out of memory"),
        (streamed([(100.0, b"data: {nonsense\n\n")]), "no JSON object"),
        (whole(500, {"error": {"message": "broken"}}), "500 for token ids: broken"),
        (whole(503, {"detail": "loading"}), "answered 503: loading"),
        ([(1.0, b"garbage\r\n\r\n")], "garbage"),
        ([], "without response"),
    ],
)  # fmt: skip
def test_a_request_that_fails_says_why(script: Packets, words: str) -> None:
    record = ask(*[script] * 9).record
    assert record.error is not None and words in record.error
    assert record.finish_reason is None


def test_what_came_before_a_failure_is_kept() -> None:
    record = ask(streamed([(100.0, sse(text_chunk("x", token_ids=[1]))), (120.0, sse({"error": "gone"}))])).record
    assert metrics(record, "ttft_ms") == [100.0] and record.error == "the server reported: gone"


def test_a_server_that_refuses_is_asked_in_a_simpler_way_and_remembered() -> None:
    refusal, answer = whole(422, {"detail": "unexpected field"}), streamed([(9.0, sse(text_chunk("x"))), (9.0, DONE)])
    server = FakeServer(refusal, refusal, refusal, refusal, answer, answer)
    target = HttpTarget("http://fake:1/v1/", connect=server.connect, clock=server.clock)
    for _ in range(2):
        assert record_events(target.serve(PROMPT, GREEDY), PLACE).record.error is None
    optional = {"return_token_ids", "stream_options", "repetition_penalty", "repeat_penalty"}
    asked = [set(fields) & optional for _, fields in server.requests[1:]]
    last = {"stream_options", "repetition_penalty"}
    assert asked == [optional, optional - {"repeat_penalty"}, {"return_token_ids", "stream_options"},
                     {*last, "repeat_penalty"}, last, last]  # fmt: skip
    assert target.dialect == "token ids, usage at the end, repetition_penalty"


def test_a_penalty_that_the_card_asks_for_has_every_name() -> None:
    server = FakeServer(streamed([(9.0, sse(text_chunk("x"))), (9.0, DONE)]))
    target = HttpTarget("http://fake:1", connect=server.connect, clock=server.clock)
    record_events(target.serve(PROMPT, {**GREEDY, "repetition_penalty": 1.3}), PLACE)
    assert server.requests[-1][1]["repetition_penalty"] == server.requests[-1][1]["repeat_penalty"] == 1.3


def test_a_server_that_stumbles_is_asked_in_a_simpler_way_until_one_worked() -> None:
    stumble, answer = whole(500, {"detail": "not text"}), streamed([(9.0, sse(text_chunk("x"))), (9.0, DONE)])
    server = FakeServer(*[stumble] * 6, answer, stumble)
    target = HttpTarget("http://fake:1", connect=server.connect, clock=server.clock)
    assert record_events(target.serve(PROMPT, GREEDY), PLACE).record.error is None
    assert target.dialect == "token ids, no counts, both names of the penalty"
    assert record_events(target.serve(PROMPT, GREEDY), PLACE).record.error == "the server answered 500: not text"


def test_a_server_without_token_ids_gets_messages_and_one_that_takes_nothing_is_quoted() -> None:
    prompt = Prompt("p", "chat", token_ids=(1,), messages=({"role": "user", "content": "hi"},))
    no = whole(400, {"error": {"message": "prompt must be text"}})
    server = FakeServer(*[no] * 9, streamed([(9.0, sse(chat_chunk(content="x"))), (9.0, DONE)]))
    target = HttpTarget("fake:1", connect=server.connect, clock=server.clock)
    assert record_events(target.serve(prompt, GREEDY), PLACE).record.error is None
    assert server.requests[-1][0] == "/v1/chat/completions"
    error = ask(*[no] * 9).record.error
    assert error == "the server refused the request: 400 for token ids: prompt must be text"


def test_only_what_matters_is_sent() -> None:
    assert request_fields(GREEDY) == {"temperature": 0.0, "max_tokens": 128, "ignore_eos": True}
    drawn = {**GREEDY, "temperature": 0.7, "top_p": 1.0, "top_k": 5, "stop": ("a",)}
    rest = {"seed": 7, "top_p": 1.0, "top_k": 5, "stop": ["a"]}
    assert request_fields(drawn) == {"temperature": 0.7, "max_tokens": 128, "ignore_eos": True, **rest}


def test_a_real_socket_gives_the_same_tokens() -> None:
    with listening(ids_script()) as url:
        answer = record_events(HttpTarget(url).serve(PROMPT, GREEDY), PLACE)
    assert answer.record.output_tokens == 13 and answer.record.error is None
    assert answer.token_ids == ask(ids_script()).token_ids
    assert 0 < (answer.record.ttft_ms or 0) <= answer.record.end_ms < 10_000


@pytest.mark.parametrize(
    ("url", "model", "words"),
    [("http://127.0.0.1:9", None, "no server answers"), ("ftp://x", None, "http://host:port"), ("http://x:99999", None, "ort")],
)  # fmt: skip
def test_an_address_without_a_server_is_a_user_error(url: str, model: str | None, words: str) -> None:
    with pytest.raises(UserError, match=words):
        HttpTarget(url, model, timeout_s=2)


def test_whose_model_it_is_is_told() -> None:
    server = FakeServer()
    server.scripts[0] = whole(200, {"data": [{"id": "a", "owned_by": "vllm"}, {"id": "b", "owned_by": "me"}]})
    target = HttpTarget("http://fake:1", "b", connect=server.connect, clock=server.clock)
    assert target.plan() == {"served_model": "b", "owned_by": "me", "dialect": "not asked yet"}


def test_a_model_that_the_server_does_not_have_is_a_user_error() -> None:
    server = FakeServer()
    with pytest.raises(UserError, match="has no model 'other'; it has fake"):
        HttpTarget("http://fake:1", "other", connect=server.connect, clock=server.clock)
