"""Two CPU replicas of nano behind Ray Serve's proxy: streaming, and a replica that is killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    from examples.ray_replicas import build

    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False,
             runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}})  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build({"model": "nano", "replicas": "2", "context_length": "512", "device": "cpu"}), route_prefix="/generate")
    yield f"http://127.0.0.1:{port}/generate"
    serve.shutdown()
    ray.shutdown()


def ask(address: str, **fields: Any) -> tuple[list[dict[str, Any]], list[float]]:
    """The lines of an answer and the moments at which they came."""
    body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 24, "ignore_eos": True, **fields}
    request = urllib.request.Request(address, json.dumps(body).encode(), method="POST")
    lines, moments = [], []
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            lines.append(json.loads(line))
            moments.append(time.monotonic())
    return lines, moments


def text(lines: list[dict[str, Any]]) -> str:
    return "".join(line["text"] for line in lines)


def test_an_answer_streams_through_the_proxy(address: str) -> None:
    lines, moments = ask(address, max_tokens=200)
    assert lines[-1]["finish_reason"] == "length" and lines[-1]["usage"]["completion_tokens"] == 200
    assert moments[-1] - moments[0] > 0.02 and len({round(m, 3) for m in moments}) > 3, "it came all at once"


def test_replicas_share_the_requests_and_say_the_same(address: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = [lines for lines, _ in pool.map(lambda _: ask(address), range(12))]
    assert len({text(lines) for lines in answers}) == 1
    assert len({lines[0]["replica"] for lines in answers}) == 2


def test_bad_requests_are_refused(address: str) -> None:
    for fields in ({"temperature": -1}, {"colour": "blue"}):
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(address, **fields)


def test_a_killed_replica_is_replaced_and_nobody_else_notices(address: str) -> None:
    lines, _ = ask(address)
    os.kill(lines[0]["replica"], signal.SIGKILL)
    end, found = time.monotonic() + 90, set[int]()
    while len(found) < 2 and time.monotonic() < end:
        with ThreadPoolExecutor(4) as pool:
            for outcome in pool.map(lambda _: attempt(address), range(4)):
                if outcome is not None:
                    assert text(outcome) == text(lines)
                    found.add(outcome[0]["replica"])
        time.sleep(0.5)
    assert len(found) == 2 and lines[0]["replica"] not in found


def attempt(address: str) -> list[dict[str, Any]] | None:
    """An answer; None for one that fell on the dead replica before Ray knew."""
    try:
        return ask(address)[0]
    except urllib.error.HTTPError as error:
        assert error.code >= 500
        return None
