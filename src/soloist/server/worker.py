"""The one slot: a thread that owns the model, and the requests that wait for it, first come, first served."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from soloist.config import SamplingParams
from soloist.errors import UserError
from soloist.llm import LLM, StreamEvent
from soloist.server.faults import NO_RETRY, Fault

State = Literal["loading", "ready", "draining", "failed"]
Reason = Literal["disconnect", "abort", "timeout", "shutdown"]

def cut_off(reason: Reason) -> Fault:
    """What to tell the client of a request that was cancelled."""
    if reason == "shutdown":
        return Fault(503, "the server is shutting down", code="shutdown", headers={"retry-after": "5"})
    if reason == "timeout":
        text = "the request took longer than the server's --request-timeout"
        return Fault(504, text, code="timeout", headers=NO_RETRY)
    return Fault(409, "the request was aborted before it began", code="aborted", headers=NO_RETRY)


class Round(NamedTuple):
    """What a round brought to one of a job's choices, and when (perf_counter)."""

    choice: int
    event: StreamEvent
    at: float


@dataclass(eq=False)
class Job:
    """A request on its way through the slot. Everything but `cancelled` belongs to the event loop's thread.

    streams: one for each choice, run in turn; streamed: whether all rounds are wanted or only the last of each choice.
    reason: why it was cancelled, None where it was not. arrived, queued, started: perf_counter when its request came, when
    it joined the queue, and at its turn.
    """

    id: str
    cancelled: threading.Event = field(default_factory=threading.Event)
    streams: list[Iterator[StreamEvent]] = field(default_factory=list)
    streamed: bool = False
    arrived: float = field(default_factory=time.perf_counter)
    queued: float | None = None
    started: float | None = None
    reason: Reason | None = None
    future: Future[None] | None = None
    ended: bool = False
    _inbox: asyncio.Queue[Round | None] = field(default_factory=asyncio.Queue)
    _error: BaseException | None = None

    async def rounds(self) -> AsyncIterator[Round]:
        """The rounds as they come.   Raises: UserError where the engine refuses to go on; what else broke it."""
        while (one := await self._inbox.get()) is not None:
            yield one
        if self._error is not None:
            raise self._error

    @property
    def queue_ms(self) -> float:
        if self.queued is None:
            return 0.0
        return ((self.started or time.perf_counter()) - self.queued) * 1e3

    def put(self, one: Round) -> None:
        self._inbox.put_nowait(one)

    def end(self, error: BaseException | None) -> None:
        self.ended, self._error = True, error
        self._inbox.put_nowait(None)


class Worker:
    """Args: load: makes the model, in the engine's thread; max_waiting: requests that may wait behind the running one;
    on_failure: called once if the engine is broken for good.
    """

    def __init__(self, load: Callable[[], LLM], max_waiting: int, on_failure: Callable[[BaseException], None]):
        self._load, self._max_waiting, self._on_failure = load, max_waiting, on_failure
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "soloist-engine")
        self._durations: deque[float] = deque([1.0], maxlen=16)
        self._llm: LLM | None = None
        self.state: State = "loading"
        self.jobs: dict[str, Job] = {}

    @property
    def llm(self) -> LLM:
        """The model.   Raises: Fault while there is none to be had."""
        self.check_ready()
        assert self._llm is not None
        return self._llm

    def check_ready(self) -> None:
        """Raises: Fault 503 unless requests are taken."""
        if self.state == "draining":
            raise cut_off("shutdown")
        if self.state != "ready":
            raise Fault(503, f"the server is {self.state}", code=self.state, headers={"retry-after": "5"})

    @property
    def running(self) -> int:
        return sum(job.started is not None for job in self.jobs.values())

    @property
    def waiting(self) -> int:
        return len(self.jobs) - self.running

    @property
    def busy(self) -> bool:
        """Whether the engine's thread has something to do, and cannot be joined at once."""
        return self.state == "loading" or bool(self.jobs)

    async def start(self) -> None:
        """Load the model.   Raises: what loading raises."""
        self._llm = await asyncio.wrap_future(self._thread.submit(self._load))
        gc.collect()
        gc.freeze()  # the model's objects live as long as the process; no collection need look at them again
        if self.state == "loading":
            self.state = "ready"

    def submit(self, job: Job) -> None:
        """Take a job into the queue.   Raises: Fault where there is no room, or one with that id is there."""
        self.check_ready()
        if job.id in self.jobs:
            raise Fault(409, f"a request with the id {job.id!r} is not finished yet", code="duplicate_id", headers=NO_RETRY)
        if len(self.jobs) > self._max_waiting:
            wait = math.ceil(sum(self._durations) / len(self._durations) * len(self.jobs))
            text = f"{len(self.jobs) - 1} requests wait behind the running one, and no more may; try again in {wait} s"
            raise Fault(503, text, code="queue_full", headers={"retry-after": str(max(1, min(wait, 60)))})
        self.jobs[job.id] = job
        job.queued = time.perf_counter()
        job.future = self._thread.submit(self._serve, job)
        job.future.add_done_callback(lambda future: self._loop.call_soon_threadsafe(self._ended, job, future))

    def cancel(self, job: Job, reason: Reason) -> bool:
        """End a job after its current round, or before its turn. False: it had ended, or was being cancelled."""
        if job.ended or job.reason is not None:
            return False
        job.reason = reason
        job.cancelled.set()
        if job.future is not None:
            job.future.cancel()
        return True

    def drain(self) -> None:
        """Take no more requests, and send away those that wait. The running one goes on."""
        if self.state in ("loading", "ready"):
            self.state = "draining"
        for job in list(self.jobs.values()):
            if job.started is None:
                self.cancel(job, "shutdown")

    def cancel_all(self) -> None:
        for job in list(self.jobs.values()):
            self.cancel(job, "shutdown")

    def _serve(self, job: Job) -> None:
        """In the engine's thread."""
        job.started = time.perf_counter()
        post = self._loop.call_soon_threadsafe
        for choice, stream in enumerate(job.streams):
            for event in stream:
                if job.streamed or event.output is not None:
                    post(job.put, Round(choice, event, time.perf_counter()))

    def _ended(self, job: Job, future: Future[None]) -> None:
        del self.jobs[job.id]
        job.streams.clear()
        error = None if future.cancelled() else future.exception()
        if job.started is not None:
            self._durations.append(time.perf_counter() - job.started)
        job.end(error)
        if error is not None and not isinstance(error, UserError):
            self._thread.submit(self._probe).add_done_callback(
                lambda probed: self._loop.call_soon_threadsafe(self._probed, probed.exception())
            )

    def _probe(self) -> None:
        """After a fault of ours: whether the engine can go on."""
        assert self._llm is not None
        self._llm.generate([0], SamplingParams(temperature=0, max_tokens=2))

    def _probed(self, error: BaseException | None) -> None:
        if error is not None and self.state != "failed":
            self.state = "failed"
            self._on_failure(error)
