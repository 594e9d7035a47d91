"""`soloist serve` as a process: how it starts, idles, ends, and what it leaves behind."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from soloist.errors import UserError
from soloist.testing.checkpoints import write_checkpoint

pytest.importorskip("msgspec")
pytest.importorskip("uvicorn")
from soloist.server.run import bind
from tests.serving import ServerProcess
from tests.test_server_slot import LONG, SHORT, TEXT, Stream, begun

PROMPT = [5 + i % 50 for i in range(500)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "ling-mtp", tokenizer=True)


def port_is_free(port: int) -> bool:
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))
    return True


def children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def told_to_end(server: ServerProcess, number: int = signal.SIGTERM) -> float:
    """Seconds until the process has ended."""
    begun = time.monotonic()
    server.process.send_signal(number)
    server.process.wait(5)
    return time.monotonic() - begun


def test_a_server_idles_serves_and_ends_between_two_requests(model: Path) -> None:
    server = ServerProcess(model, "--drafter", "mtp").up()
    try:
        assert children(server.process.pid) == []
        second = ServerProcess(model, port=server.port)
        assert second.ended() == 2 and f"port {server.port}" in second.log
        before, clock = cpu_seconds(server.process.pid), time.monotonic()
        time.sleep(2.5)
        share = (cpu_seconds(server.process.pid) - before) / (time.monotonic() - clock)
        assert share < 0.02, f"{share:.1%} of a core while idle"
        assert server.post(TEXT, SHORT)[0] == 200
        assert told_to_end(server) < 2 and server.end() == 0
        assert port_is_free(server.port)
    finally:
        server.end()
    said = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    assert [one["event"] for one in said] == ["ready", "request", "stopping", "stopped"]
    assert "train" not in server.log, "a prompt in the log"


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("moment", ["load", "prefill", "decode"])
def test_sigterm_ends_the_process_and_frees_the_port(model: Path, moment: str) -> None:
    """A request that would take longer than the drain timeout is told why it ends."""
    server = ServerProcess(model, "--prefill-chunk", "1", "--drain-timeout", "0.5")
    try:
        server.up("/health" if moment == "load" else "/ready")
        stream: Any = None
        if moment == "prefill":
            stream = Stream(server, {"prompt": PROMPT, "max_tokens": 4})
            while not server.status()["running"]:
                time.sleep(0.002)
        if moment == "decode":
            stream, events, _ = begun(server)
        assert told_to_end(server) < 5
        if moment == "decode":
            *_, last = events
            assert last["error"]["code"] == "shutdown"
        if moment == "prefill":
            assert stream.head()[0] == 503
        assert server.end() == 0 and port_is_free(server.port)
    finally:
        server.end()


def test_a_request_that_ends_in_time_is_answered_whole_and_those_behind_it_are_sent_away(model: Path) -> None:
    """Here at Ctrl+C."""
    server = ServerProcess(model, "--drain-timeout", "4").up()
    try:
        body = {**LONG, "max_tokens": 60}
        whole = server.post(TEXT, body)[1]["choices"][0]["text"]
        _, events, first = begun(server, body)
        second = Stream(server, SHORT)
        while not server.status()["waiting"]:
            time.sleep(0.002)
        server.process.send_signal(signal.SIGINT)
        said = [first, *events]
        assert "".join(one["choices"][0]["text"] for one in said) == whole
        assert said[-1]["choices"][0]["finish_reason"] == "length"
        assert second.head()[0] == 503
        server.process.wait(5)
        assert server.end() == 128 + signal.SIGINT
    finally:
        server.end()


def test_a_second_signal_ends_the_process_at_once(model: Path) -> None:
    server = ServerProcess(model, "--drain-timeout", "60").up()
    try:
        stream, _, _ = begun(server)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert server.process.poll() is None and told_to_end(server) < 1
        assert server.end() == 128 + signal.SIGTERM and port_is_free(server.port)
        stream.close()
    finally:
        server.end()


def test_a_server_that_was_killed_starts_again_in_its_place_and_says_the_same(model: Path) -> None:
    first = ServerProcess(model).up()
    try:
        said = first.post(TEXT, SHORT)[1]["choices"]
        stream, events, _ = begun(first)
        first.process.kill()
        assert first.process.wait(5) == -signal.SIGKILL
        assert not [event for event in events if event.get("error")], "nobody was left to say more"
    finally:
        first.end()
    second = ServerProcess(model, port=first.port).up()
    try:
        assert second.post(TEXT, SHORT)[1]["choices"] == said
        stream.close()
    finally:
        second.end()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [(("--port", "70000"), "port"), (("--max-queue", "-1"), "max_queue"), (("--drafter", "dspark"), "dspark")],
)
def test_a_server_that_cannot_start_says_why_in_one_line_with_code_2(
    model: Path, flags: tuple[str, str], complaint: str
) -> None:
    server = ServerProcess(model, *flags)
    assert server.ended() == 2
    assert complaint in server.log and server.log.count("\n") == 1, server.log


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_bad_requests_leave_memory_and_answers_as_they_were(model: Path) -> None:
    """Broken JSON, prompts too large, hanging up at any moment, aborts, grammars, all at once from eight threads."""
    server = ServerProcess(model, "--drafter", "mtp", "--max-queue", "64").up()
    draw, sizes = random.Random(1), list[int]()

    def one(kind: int, patience: float) -> None:
        body = {**LONG, "prompt": [3 + kind, 5], "max_tokens": 20 + kind * 20}
        if kind < 3:
            stream = Stream(server, body if kind else {**body, "prompt": PROMPT[:400]})
            time.sleep(patience)
            stream.close()
        elif kind == 3:
            server.post("/v1/abort", {"id": begun(server, body)[2]["id"]})
        elif kind == 4:
            server.post(TEXT, b'{"prompt": "a", "max_tokens": ')
            server.post(TEXT, {"prompt": [5] * 9000})
        else:
            server.post(TEXT, {"prompt": "a", "max_tokens": 8, "response_format": {"type": "regex", "regex": "[ab]{3}"}})

    try:
        said = server.post(TEXT, SHORT)[1]["choices"]
        for _ in range(7):
            with ThreadPoolExecutor(8) as pool:
                for done in [pool.submit(one, draw.randrange(6), draw.random() / 10) for _ in range(240)]:
                    done.result()
            assert server.idle_within(5) and server.status()["waiting"] == 0
            assert server.post(TEXT, SHORT)[1]["choices"] == said
            sizes.append(resident(server.process.pid))
        assert sizes[-1] <= sizes[1] * 1.02, sizes  # the allocator has its pools after the first 480
        assert not [name for name in server.metrics() if 'status="500"' in name]
    finally:
        server.end()


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_no_request_that_the_openapi_file_allows_or_forbids_is_a_fault_of_ours(model: Path) -> None:
    pytest.importorskip("schemathesis")
    server = ServerProcess(model, "--max-queue", "64").up()
    try:
        said = server.post(TEXT, SHORT)[1]["choices"]
        command = [Path(sys.executable).with_name("schemathesis"), "run", f"{server.url}/openapi.json", "--max-examples", "250",
                   "--phases", "examples,coverage,fuzzing", "--checks", "not_a_server_error", "--seed", "1"]  # fmt: skip
        found = subprocess.run([*map(str, command)], capture_output=True, text=True)
        assert server.post(TEXT, SHORT)[1]["choices"] == said
        assert server.metrics()["soloist_requests_running"] == 0
        faults = {name: count for name, count in server.metrics().items() if 'status="500"' in name}
        assert not faults, found.stdout[-3000:]
        cases = sum(count for name, count in server.metrics().items() if name.startswith("soloist_http_responses"))
        assert cases > 2000, (cases, found.stdout[-3000:])
    finally:
        server.end()


def test_an_address_that_cannot_be_had_is_told_by_name() -> None:
    with pytest.raises(UserError, match="no.such.host.invalid port 0: .*--port"):
        bind("no.such.host.invalid", 0)
