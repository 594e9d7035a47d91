"""Servers for tests: `serving` runs one in a thread around a loaded model; `ServerProcess` is `soloist serve` as users
start it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from soloist import LLM
from soloist.server.run import Process, bind, loop_factory
from soloist.server.settings import ServerSettings


class Address:
    """How to speak to a server."""

    def __init__(self, port: int):
        self.port, self.url = port, f"http://127.0.0.1:{port}"

    def client(self, key: str = "none") -> Any:
        """OpenAI's own, which repeats nothing."""
        return client_of(f"{self.url}/v1", key)

    def ask(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """A response: status, headers with small names, body. What is sent is JSON; a name's _ stands for -."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        named = {"content-type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
        request = urllib.request.Request(self.url + path, data, named, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, {name.lower(): text for name, text in reply.headers.items()}, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, {name.lower(): text for name, text in error.headers.items()}, error.read()

    def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        status, _, answer = self.ask(path, body)
        return status, json.loads(answer)

    def alive(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
        except ConnectionRefusedError:
            return False
        return True

    def status(self) -> dict[str, Any]:
        return json.loads(self.ask("/health")[2])

    def metrics(self) -> dict[str, float]:
        lines = [line for line in self.ask("/metrics")[2].decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def idle_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.status()["running"] == 0:
                return True
            time.sleep(0.02)
        return False

    def wait(self, path: str = "/ready", alive: Callable[[], bool] = lambda: True) -> None:
        """Until there is a good answer."""
        for _ in range(3000):
            assert alive(), "the server has ended"
            with contextlib.suppress(urllib.error.URLError, OSError):
                if self.ask(path)[0] == 200:
                    return
            time.sleep(0.02)
        raise AssertionError(f"no good answer from {path}")


@contextlib.contextmanager
def serving(load: LLM | Callable[[], LLM], name: str = "tiny", code: int = 0, **settings: Any) -> Iterator[Address]:
    """load: the model, or what makes it while the server is up already; code: how the server is to end."""
    listener = bind("127.0.0.1", 0)
    address = Address(listener.getsockname()[1])
    process = Process(ServerSettings(port=address.port, **settings), name, load if callable(load) else lambda: load)
    begun, loops = threading.Event(), list[asyncio.AbstractEventLoop]()

    async def live() -> int:
        loops.append(asyncio.get_running_loop())
        begun.set()
        return await process.run(listener)

    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(asyncio.Runner(loop_factory=loop_factory()).run(live())))
    thread.start()
    begun.wait()
    try:
        if isinstance(load, LLM):
            address.wait()
        yield address
    finally:
        loops[0].call_soon_threadsafe(process.stop)
        thread.join(30)
    assert codes == [code], codes


class ServerProcess(Address):
    """Started and not waited for; `log` holds what it wrote on stderr once `end` was called."""

    def __init__(self, model: str | Path, *flags: str, port: int | None = None):
        super().__init__(free_port() if port is None else port)
        command = [sys.executable, "-m", "soloist", "serve", "--model", str(model), "--port", str(self.port)]
        environment = {**os.environ, "PYTHONPATH": "src", "OMP_NUM_THREADS": "1"}
        self._stderr = tempfile.TemporaryFile()  # a pipe that nobody reads would be full one day, and the server wait for it
        self.process = subprocess.Popen([*command, "--context-length", "512", *flags], env=environment, stderr=self._stderr)
        self.log = ""

    def up(self, path: str = "/ready") -> ServerProcess:
        self.wait(path, lambda: self.process.poll() is None)
        return self

    def ended(self) -> int:
        """Wait until it ends by itself; its exit code."""
        try:
            self.process.wait(60)
        finally:
            self.end()
        return self.process.returncode

    def end(self) -> int:
        """Its exit code; a server that still runs is killed."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._stderr.seek(0)
        self.log = self._stderr.read().decode()
        return self.process.returncode


@cache
def client_of(url: str, key: str) -> Any:
    """One for all requests: to make one takes longer than a short answer."""
    import openai

    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
