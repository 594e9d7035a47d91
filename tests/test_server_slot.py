"""The one slot: first come, first served; whoever goes, is sent away or fails leaves it free and changes no other answer."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from soloist import LLM, SamplingParams
from soloist.runtime.prefill import CUT
from soloist.state.prefix import MARGIN

pytest.importorskip("openai")
pytest.importorskip("uvicorn")
import openai

from tests.llms import fresh, nano
from tests.serving import Address, serving

TEXT = "/v1/completions"
LONG = {"prompt": "a", "max_tokens": 900, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": "The train", "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Address]:
    with serving(nano("mtp", 3), "nano") as address:
        yield address


class Stream:
    """A streamed request, read event by event; closing it in between hangs up."""

    def __init__(self, address: Address, body: dict[str, Any], path: str = TEXT):
        data = json.dumps({**body, "stream": True}).encode()
        self._socket = socket.create_connection(("127.0.0.1", address.port), timeout=30)
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        self._socket.sendall(head.encode() + data)
        self._file = self._socket.makefile("rb")

    def head(self) -> tuple[int, dict[str, str]]:
        status = int(self._file.readline().split()[1])
        pairs = (line.decode().strip().split(": ", 1) for line in iter(self._file.readline, b"\r\n"))
        return status, {name.lower(): value for name, value in pairs}

    def events(self) -> Iterator[Any]:
        for line in self._file:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
            if line == b"data: [DONE]\n" or line == b"0\r\n":
                return

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def begun(address: Address, body: dict[str, Any] = LONG) -> tuple[Stream, Iterator[Any], dict[str, Any]]:
    """A request in the slot that has said something."""
    stream = Stream(address, body)
    assert stream.head()[0] == 200
    events = stream.events()
    return stream, events, next(events)


def waiting(address: Address, count: int) -> None:
    for _ in range(500):
        if address.status()["waiting"] == count:
            return
        time.sleep(0.01)
    raise AssertionError(address.status())


def answer(address: Address) -> Any:
    return address.post(TEXT, SHORT)[1]["choices"]


# ---- the queue --------------------------------------------------------------------------------------------------------


def test_those_who_wait_are_served_in_the_order_in_which_they_came(server: Address) -> None:
    first, _, _ = begun(server)
    ended: list[int] = []
    with ThreadPoolExecutor(4) as pool:
        for i in range(4):
            pool.submit(lambda i=i: (server.post(TEXT, SHORT), ended.append(i)))
            waiting(server, i + 1)
        first.close()
    assert ended == [0, 1, 2, 3]


def test_the_wait_is_told_and_is_no_part_of_the_time_to_the_first_token(server: Address) -> None:
    first, events, _ = begun(server, {**LONG, "max_tokens": 40})
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(server.ask, TEXT, {**SHORT, "timings": True})
        waiting(server, 1)
        time.sleep(0.3)
        for _ in events:
            pass
        _, headers, body = second.result()
    times = json.loads(body)["timings"]
    assert times["queue_ms"] > 250 and times["queue_ms"] == pytest.approx(float(headers["server-timing"].split("=")[1]), abs=0.1)
    alone = server.post(TEXT, {**SHORT, "timings": True})[1]["timings"]
    assert alone["queue_ms"] < 100 and times["ttft_ms"] < times["queue_ms"] + alone["ttft_ms"]
    assert server.metrics()["soloist_queue_seconds_sum"] * 1e3 >= times["queue_ms"]


def test_a_full_queue_says_when_to_come_back_and_a_place_that_is_left_is_free() -> None:
    with serving(nano(), "nano", max_queue=1) as server:
        first, _, _ = begun(server)
        second = Stream(server, SHORT)
        waiting(server, 1)
        with pytest.raises(openai.APIStatusError) as refused:
            server.client().completions.create(model="nano", prompt="a")
        assert refused.value.status_code == 503 and int(refused.value.response.headers["retry-after"]) >= 1
        second.close()
        waiting(server, 0)
        third = Stream(server, SHORT)
        waiting(server, 1)
        first.close()
        assert third.head()[0] == 200 and list(third.events())[-1]["choices"][0]["finish_reason"] == "length"


def test_two_requests_of_one_name_do_not_run_at_once(server: Address) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.ask, TEXT, {**SHORT, "max_tokens": 60, "ignore_eos": True}, x_request_id="mine")
        while not server.status()["running"]:
            time.sleep(0.005)
        status, _, body = server.ask(TEXT, SHORT, x_request_id="mine")
        assert status == 409 and json.loads(body)["error"]["code"] == "duplicate_id"
        status, headers, body = first.result()
    assert status == 200 and headers["x-request-id"] == json.loads(body)["id"] == "mine"
    assert server.ask(TEXT, SHORT, x_request_id="mine")[0] == 200
    assert server.ask(TEXT, SHORT, x_request_id="not a name")[0] == 400


# ---- the end of a request before its end ------------------------------------------------------------------------------


def test_a_client_that_hangs_up_frees_the_slot_and_leaves_the_next_answer_alone(server: Address) -> None:
    before, gone = answer(server), server.metrics().get('soloist_requests_cancelled_total{reason="disconnect"}', 0)
    for rounds in range(3):
        stream, events, _ = begun(server)
        for _ in range(rounds):
            next(events)
        stream.close()
        assert server.idle_within(1)
        assert answer(server) == before
    assert server.metrics()['soloist_requests_cancelled_total{reason="disconnect"}'] == gone + 3


def test_a_client_that_does_not_stream_and_hangs_up_frees_the_slot_too(server: Address) -> None:
    before, data = answer(server), json.dumps(LONG).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as gone:
        head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        gone.sendall(head.encode() + data)
        while not server.status()["running"]:
            time.sleep(0.01)
    assert server.idle_within(1) and answer(server) == before


def test_a_client_that_hangs_up_in_the_middle_of_a_prompt_frees_the_slot_after_that_pass() -> None:
    """Passes of 16 tokens over a prompt of 1000: a server that went on to its end would be busy for seconds."""
    with LLM(device="cpu", context_length=1024, prefill_chunk=16) as llm, serving(llm, "nano") as server:
        before, prompt = answer(server), [5 + i % 50 for i in range(1000)]
        stream = Stream(server, {"prompt": prompt, "max_tokens": 5})
        while not server.status()["running"]:
            time.sleep(0.005)
        stream.close()
        assert server.idle_within(0.5)
        assert answer(server) == before
        assert server.metrics()["soloist_generated_tokens_total"] == 12


def test_answers_that_come_to_their_end_cancel_nothing(server: Address) -> None:
    def cancelled() -> float:
        return sum(value for name, value in server.metrics().items() if name.startswith("soloist_requests_cancelled_total"))

    before = cancelled()
    for stream in (True, False) * 5:
        server.ask(TEXT, {**SHORT, "max_tokens": 2, "stream": stream})
    assert cancelled() == before


def test_an_abort_ends_a_stream_with_its_reason_and_a_waiting_request_before_its_turn(server: Address) -> None:
    stream, events, first = begun(server)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(server.ask, TEXT, SHORT, None, x_request_id="second")
        waiting(server, 1)
        assert server.post("/v1/abort", {"id": "second"}) == (200, {"id": "second", "aborted": True})
        status, _, body = second.result()
        assert status == 409 and json.loads(body)["error"]["code"] == "aborted"
    assert server.post("/v1/abort", {"id": first["id"]})[0] == 200
    assert list(events)[-1]["choices"][0]["finish_reason"] == "cancelled"
    assert server.post("/v1/abort", {"id": first["id"]})[0] == 404
    stream.close()


def test_a_request_that_takes_too_long_is_told_so_in_its_wait_in_its_stream_and_in_its_answer() -> None:
    with serving(nano(), "nano", request_timeout=0.6) as server:
        status, headers, body = server.ask(TEXT, LONG)
        assert status == 504 and json.loads(body)["error"]["code"] == "timeout" and headers["x-should-retry"] == "false"
        *_, last = begun(server)[1]
        assert last["error"]["code"] == "timeout" and last["error"]["type"] == "timeout_error"
        with contextlib.closing(nano().stream("a", SamplingParams(max_tokens=900, ignore_eos=True))) as held:
            next(held)  # whoever reads this stream has the model: the first request waits for it, the second for the first
            first = Stream(server, LONG)
            while not server.status()["running"]:
                time.sleep(0.005)
            second = Stream(server, LONG)
            assert second.head()[0] == 504
        assert first.head()[0] == 504
        assert server.idle_within(1)
        assert server.post(TEXT, SHORT)[0] == 200
        assert server.metrics()['soloist_requests_cancelled_total{reason="timeout"}'] == 4


def test_bad_traffic_leaves_no_stuck_slot_and_the_same_answers(server: Address) -> None:
    before = answer(server)
    for i in range(12):
        body = {"prompt": [5, i + 3], "max_tokens": 300, "ignore_eos": True}
        stream = Stream(server, body)
        time.sleep(i % 4 / 100)
        stream.close()
        assert server.post(TEXT, b"{")[0] == 400
        assert server.post(TEXT, {"prompt": [5] * 9000})[0] == 400
    assert server.idle_within(2) and server.status()["waiting"] == 0
    assert answer(server) == before


def test_a_greedy_answer_is_the_same_beside_sampled_ones(server: Address) -> None:
    before = answer(server)
    with ThreadPoolExecutor(4) as pool:
        said = [pool.submit(answer, server) for _ in range(3)]
        for seed in range(5):
            pool.submit(server.post, TEXT, {**SHORT, "temperature": 1.5, "seed": seed})
    assert all(one.result() == before for one in said)


# ---- faults of the engine ---------------------------------------------------------------------------------------------


def test_a_fault_in_the_middle_of_a_stream_is_its_last_event_and_the_next_request_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fresh("ling-mtp", tokenizer=True) as llm, serving(llm) as server:
        before, read, calls = answer(server), llm._engine.runner.read, iter(range(100))

        def broken() -> Any:
            if next(calls) == 2:
                raise RuntimeError("as if")
            return read()

        monkeypatch.setattr(llm._engine.runner, "read", broken)
        stream, events, _ = begun(server, {**LONG, "max_tokens": 40})
        said = list(events)
        assert len(said) == 3 and said[-1]["error"]["type"] == "server_error" and "as if" not in said[-1]["error"]["message"]
        assert answer(server) == before and server.ask("/ready")[0] == 200


def test_an_engine_that_does_not_recover_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """With code 1, for its supervisor to start it again."""

    def broken() -> Any:
        raise RuntimeError("as if")

    with fresh("llama") as llm, serving(llm, code=1) as server:
        monkeypatch.setattr(llm._engine.runner, "read", broken)
        assert server.post(TEXT, {"prompt": [5], "max_tokens": 4})[0] == 500
        for _ in range(500):
            if not server.alive():
                return
            time.sleep(0.02)
    raise AssertionError("the server goes on")


# ---- conversations ----------------------------------------------------------------------------------------------------


def test_ten_turns_compute_their_new_part_only_and_say_what_a_server_without_reuse_says() -> None:
    with serving(nano("mtp", 3), "nano") as server:
        computed = conversation(server)
    with LLM(device="cpu", drafter="mtp", draft_width=3, context_length=1024) as llm, serving(llm, "nano") as server:
        reused = conversation(server)
    assert [text for text, _, _ in reused] == [text for text, _, _ in computed]
    assert all(cached == 0 for _, _, cached in computed)
    for (_, before, _), (_, prompt, cached) in pairwise(reused):
        assert prompt - cached <= prompt - before + CUT + MARGIN
    assert reused[-1][2] > reused[-1][1] / 2


def conversation(server: Address) -> list[tuple[str, int, int]]:
    """Text, prompt tokens and cached ones of ten turns."""
    messages, turns = [], []
    for turn in range(10):
        messages.append({"role": "user", "content": f"Name {turn + 2} things that float, please."})
        said = server.client().chat.completions.create(model="nano", messages=messages, temperature=0, max_tokens=6)
        text, usage = said.choices[0].message.content, said.usage
        messages.append({"role": "assistant", "content": text})
        turns.append((text, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens))
    return turns


def test_ready_comes_after_loading_and_what_is_asked_before_is_told_to_come_back() -> None:
    go = threading.Event()

    def load() -> LLM:
        go.wait(30)
        return nano()

    with serving(load, "nano") as server:
        server.wait("/health")
        assert server.ask("/ready")[0] == 503 and server.status()["status"] == "loading"
        status, headers, body = server.ask(TEXT, SHORT)
        assert status == 503 and int(headers["retry-after"]) > 0 and json.loads(body)["error"]["code"] == "loading"
        assert server.metrics()["soloist_ready"] == 0
        go.set()
        server.wait()
        text = nano().generate("The train", SamplingParams(temperature=0, max_tokens=6)).text
        assert answer(server)[0]["text"] == text and server.metrics()["soloist_ready"] == 1
