"""The process: bind, load beside a server that already tells how it stands, serve, drain, leave."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
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
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        process = Process(settings, str(engine["model"]), partial(LLM, progress=True, **engine))
        code = runner.run(_until_told(process, listener))
        if process.busy:  # the engine's thread cannot be ended, nor waited for
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return code


async def _until_told(process: Process, listener: socket.socket) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, process.signalled, number)
    return await process.run(listener)


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


def loop_factory() -> Any:
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
    """One life of the server.

    Args: model: as the user named it; load: makes it, in the engine's thread.
    """

    def __init__(self, settings: ServerSettings, model: str, load: Callable[[], LLM]):
        self._settings, self._model, self._load = settings, model, load
        self._code = 0
        self._stopping = False
        self._worker: Worker
        self._server: _Server

    @property
    def busy(self) -> bool:
        return self._worker.busy

    async def run(self, listener: socket.socket) -> int:
        """Serve until told to stop; returns the exit code.   Raises: what loading raises."""
        settings = self._settings
        self._worker = Worker(self._load, settings.max_queue, self._fail)
        app = App(self._worker, settings, self._model)
        config = uvicorn.Config(
            app, lifespan="off", ws="none", log_config=None, access_log=False, server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=ceil(settings.drain_timeout + GRACE_S),
        )  # fmt: skip
        self._server = _Server(config)
        serving = asyncio.ensure_future(self._server.serve([listener]))
        loading = asyncio.ensure_future(self._announce(app.name, listener.getsockname()[1]))
        await asyncio.wait((serving, loading), return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and loading.exception() is not None:
            self.stop()
        await serving
        if loading.done():
            loading.result()
        log("stopped", code=self._code)
        return self._code

    async def _announce(self, name: str, port: int) -> None:
        await self._worker.start()
        if self._stopping:
            return
        host = self._settings.host
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        print(f"soloist: {name} is ready at http://{shown}:{port} (API at /v1, a page to chat at /)", file=sys.stderr)
        log("ready", model=name, port=port, context_length=self._worker.llm.plan.context_length)

    def signalled(self, number: signal.Signals) -> None:
        if self._stopping:
            os._exit(128 + number)
        log("stopping", signal=number.name, running=self._worker.running, waiting=self._worker.waiting)
        self._code = 0 if number == signal.SIGTERM else 128 + number
        self.stop()

    def _fail(self, error: BaseException) -> None:
        """The engine is broken: end, so that whoever supervises the process starts a new one."""
        log_fault(error, what="the engine does not recover")
        self._code = 1
        self.stop()

    def stop(self) -> None:
        """Take no more requests, drain, leave."""
        self._stopping = True
        self._worker.drain()
        self._server.should_exit = True
        asyncio.get_running_loop().call_later(self._settings.drain_timeout, self._worker.cancel_all)
