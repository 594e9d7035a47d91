"""What the server adds to a round: time from the engine's round to the client's read, and its work for each chunk.

    python benchmarks/server_chunks.py [--runs 5] [--output benchmarks/runs/server-chunks-cpu.json]

Rounds of nano with its NEXTN layer are recorded once and then replayed to the real server, over a real socket, to a client
in a process of its own: as fast as they go (`burst`, which is what keeps up with an infinitely fast engine) and one a
millisecond (`paced`, where every chunk wakes the server anew). Exit code 1 if a chunk of the burst takes more than 60 us.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from soloist import LLM, SamplingParams
from soloist.bench.machine import read_machine
from soloist.llm import StreamEvent
from soloist.server.run import Process, bind, loop_factory
from soloist.server.settings import ServerSettings

MESSAGES = [{"role": "user", "content": "Tell me about lighthouses."}]
CHUNKS, PACED, LIMIT_US = 3000, 1000, 60

CLIENT = """
import json, socket, sys, time
port, body = int(sys.argv[1]), sys.argv[2].encode()
head = "POST /v1/chat/completions HTTP/1.1\\r\\nhost: x\\r\\ncontent-type: application/json\\r\\n"
head += f"content-length: {len(body)}\\r\\n\\r\\n"
with socket.create_connection(("127.0.0.1", port)) as server:
    server.sendall(head.encode() + body)
    parts = []
    while not parts or b"[DONE]" not in parts[-1][1]:
        data = server.recv(1 << 16)
        assert data, parts
        parts.append((time.perf_counter(), data))
json.dump([(at, data.count(b"data: {")) for at, data in parts], sys.stdout)
"""
"""Notes when which chunks came, as fast as Python can; perf_counter is one clock for all processes."""


class Replay:
    """Stands in for `LLM.stream`. at: when each round ended."""

    def __init__(self, rounds: list[StreamEvent]):
        self._rounds = rounds
        self.count, self.pause_s = CHUNKS, 0.0
        self.at: list[float] = []

    def __call__(self, prompt: Any, params: Any = None, cancelled: Any = None) -> Iterator[StreamEvent]:
        *running, last = self._rounds
        self.at = []
        due = time.perf_counter()
        for event in itertools.islice(itertools.cycle(running), self.count - 1):
            due += self.pause_s
            if self.pause_s:
                time.sleep(max(0.0, due - time.perf_counter()))
            self.at.append(time.perf_counter())
            yield event
        self.at.append(time.perf_counter())
        yield last


class Serving:
    """The server in a thread of its own."""

    def __init__(self, llm: LLM):
        self._listener = bind("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        self._process = Process(ServerSettings(), "nano", lambda: llm)
        self.thread = threading.Thread(target=self._live)
        self.thread.start()

    def _live(self) -> None:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            self._loop = runner.get_loop()
            runner.run(self._process.run(self._listener))

    def cpu_s(self) -> float:
        return time.clock_gettime(time.pthread_getcpuclockid(self.thread.ident or 0))

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._process.stop)
        self.thread.join()


def once(server: Serving, replay: Replay) -> dict[str, float]:
    body = json.dumps({"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}})
    before = server.cpu_s()
    said = subprocess.run([sys.executable, "-c", CLIENT, str(server.port), body], capture_output=True, check=True)
    work_s = server.cpu_s() - before
    arrived = [at for at, count in json.loads(said.stdout) for _ in range(count)][: replay.count]
    assert len(arrived) == replay.count, (len(arrived), replay.count)
    late = sorted(1e6 * (there - here) for there, here in zip(arrived, replay.at, strict=True))
    return {
        "wall_us_per_chunk": 1e6 * (arrived[-1] - replay.at[0]) / replay.count,
        "server_cpu_us_per_chunk": 1e6 * work_s / replay.count,
        "delay_us_median": late[len(late) // 2],
        "delay_us_p99": late[int(len(late) * 0.99)],
    }


def medians(measure: Callable[[], dict[str, float]], runs: int) -> dict[str, Any]:
    samples = [measure() for _ in range(runs)]
    return {name: {"median": statistics.median(values := [one[name] for one in samples]), "runs": values} for name in samples[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    llm = LLM(drafter="mtp", draft_width=3, device="cpu")
    rounds = list(llm.stream(MESSAGES, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)))
    replay = Replay(rounds)
    llm.stream = replay  # type: ignore[method-assign]
    server = Serving(llm)
    time.sleep(1)
    once(server, replay)
    found: dict[str, Any] = {"burst": medians(lambda: once(server, replay), args.runs)}
    replay.count, replay.pause_s = PACED, 1e-3
    found["paced"] = medians(lambda: once(server, replay), args.runs)
    server.stop()
    found["tokens_per_chunk"] = sum(len(event.token_ids) for event in rounds) / len(rounds)
    found["load_average"] = os.getloadavg()[0]  # what else ran: delays grow with it, the burst hardly
    found["machine"] = dataclasses.asdict(read_machine(llm.plan.threads))
    for name in ("burst", "paced"):
        print(name, {key: round(value["median"], 1) for key, value in found[name].items()})
    if args.output:
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    return int(found["burst"]["wall_us_per_chunk"]["median"] > LIMIT_US)


if __name__ == "__main__":
    sys.exit(main())
