"""The process: bind, load beside a server that already tells how it stands, serve, drain, leave."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import ceil
from typing import Any

import uvicorn

from soloist.errors import UserError
from soloist.llm import LLM
from soloist.server.app import App
from soloist.server.log import log, log_fault
from soloist.server.settings import ServerSettings
from soloist.server.worker import Worker

KEEP_ALIVE_S = 30
GRACE_S = 1.0
"""How long connections may take to end after the last request was cut off."""


def serve(settings: ServerSettings, engine: dict[str, Any]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. A second signal ends the process at once.

    Raises: UserError where the port is taken, and what loading the model raises.
    """
    listener = bind(settings.host, settings.port)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        process = Process(settings, engine)
        code = runner.run(process.run(listener))
        if process.busy:  # the engine's thread cannot be ended, nor waited for
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return code


def bind(host: str, port: int) -> socket.socket:
    """Raises: UserError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise UserError(f"cannot listen at {host} port {port}: {error.strerror}; choose another with --port") from error
    return listener


def _loop_factory() -> Any:
    """uvloop's where it is installed; it is not to be had on every system."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: when to stop is decided here."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Process:
    """One life of the server."""

    def __init__(self, settings: ServerSettings, engine: dict[str, Any]):
        self._settings, self._engine = settings, engine
        self._code = 0
        self._stopping = False
        self._worker: Worker
        self._server: _Server

    @property
    def busy(self) -> bool:
        return self._worker.busy

    async def run(self, listener: socket.socket) -> int:
        settings, loop = self._settings, asyncio.get_running_loop()
        self._worker = Worker(partial(LLM, progress=True, **self._engine), settings.max_queue, self._fail)
        app = App(self._worker, settings, str(self._engine["model"]))
        config = uvicorn.Config(
            app, lifespan="off", ws="none", log_config=None, access_log=False, server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=ceil(settings.drain_timeout + GRACE_S),
        )  # fmt: skip
        self._server = _Server(config)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal, number)
        serving = asyncio.ensure_future(self._server.serve([listener]))
        loading = asyncio.ensure_future(self._load(app.name, listener.getsockname()[1]))
        await asyncio.wait((serving, loading), return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and loading.exception() is not None:
            self._stop()
        await serving
        if loading.done():
            loading.result()
        log("stopped", code=self._code)
        return self._code

    async def _load(self, name: str, port: int) -> None:
        await self._worker.start()
        if self._stopping:
            return
        host = self._settings.host
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        print(f"soloist: {name} is ready at http://{shown}:{port} (API at /v1, a page to chat at /)", file=sys.stderr)
        log("ready", model=name, port=port, context_length=self._worker.llm.plan.context_length)

    def _signal(self, number: signal.Signals) -> None:
        if self._stopping:
            os._exit(128 + number)
        log("stopping", signal=number.name, running=self._worker.running, waiting=self._worker.waiting)
        self._code = 0 if number == signal.SIGTERM else 128 + number
        self._stop()

    def _fail(self, error: BaseException) -> None:
        """The engine is broken: end, so that whoever supervises the process starts a new one."""
        log_fault(error, what="the engine does not recover")
        self._code = 1
        self._stop()

    def _stop(self) -> None:
        self._stopping = True
        self._worker.drain()
        self._server.should_exit = True
        asyncio.get_running_loop().call_later(self._settings.drain_timeout, self._worker.cancel_all)
