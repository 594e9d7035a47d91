"""A server that says what a test tells it to say, at the moments the test names, on a clock that nobody waits for.

`Script` makes the bytes of an answer; `FakeServer` delivers them as a socket would, and sets its clock to each packet's
time. `listening` serves the same scripts on a real port, packet by packet.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

Packets = list[tuple[float, bytes]]
"""Milliseconds since the request came, and the bytes that go out then."""


def sse(content: Any) -> bytes:
    data = content if isinstance(content, str) else json.dumps(content)
    return f"data: {data}\n\n".encode()


def text_chunk(text: str, finish: str | None = None, **extra: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    if "token_ids" in extra:
        choice["token_ids"] = extra.pop("token_ids")
    return {"object": "text_completion", "choices": [choice], **extra}


def chat_chunk(finish: str | None = None, usage: dict[str, Any] | None = None, **delta: Any) -> dict[str, Any]:
    chunk = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    return chunk if usage is None else {**chunk, "usage": usage}


def usage_chunk(prompt: int, completion: int, **extra: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **extra}}


def streamed(events: Sequence[tuple[float, bytes]], head_ms: float = 0.5) -> Packets:
    """A chunked answer: events of equal time lie in one packet. The head goes out before the first."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    packets: Packets = [(head_ms, head)]
    for t_ms, data in events:
        chunk = b"%x\r\n%s\r\n" % (len(data), data)
        if packets[-1][0] == t_ms:
            packets[-1] = (t_ms, packets[-1][1] + chunk)
        else:
            packets.append((t_ms, chunk))
    last_ms, last = packets.pop()
    return [*packets, (last_ms, last + b"0\r\n\r\n")]


def whole(status: int, content: Any, t_ms: float = 1.0) -> Packets:
    body = json.dumps(content).encode()
    return [(t_ms, b"HTTP/1.1 %d Said\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))]


MODELS = whole(200, {"data": [{"id": "fake"}]})


class FakeServer:
    """Answers the n-th request with the n-th script. requests: what was asked, as (path, fields)."""

    def __init__(self, *scripts: Packets, started_ms: float = 0.0):
        self.scripts = [MODELS, *scripts]
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.now_ms = started_ms
        self._sent_ms = 0.0
        self._waiting: Packets = []

    def clock(self) -> float:
        return self.now_ms / 1e3

    def connect(self, host: str, port: int, secure: bool, timeout_s: float) -> FakeServer:
        self.now_ms += 250.0  # opening a connection takes time that is no part of any metric
        return self

    def sendall(self, data: bytes) -> None:
        self.requests.append(parse(data))
        self._sent_ms, self._waiting = self.now_ms, list(self.scripts[len(self.requests) - 1])

    def recv_into(self, buffer: memoryview) -> int:
        if not self._waiting:
            return 0
        t_ms, data = self._waiting.pop(0)
        self.now_ms = self._sent_ms + t_ms
        part = data[: len(buffer)]
        if part != data:
            self._waiting.insert(0, (t_ms, data[len(part) :]))
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self._waiting = []


def parse(request: bytes) -> tuple[str, dict[str, Any]]:
    head, _, body = request.partition(b"\r\n\r\n")
    return head.split(b" ")[1].decode(), json.loads(body) if body else {}


@contextlib.contextmanager
def listening(*scripts: Packets) -> Iterator[str]:
    """The same answers on a real port, as fast as they go out; yields the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        def serve() -> None:
            for script in [MODELS, *scripts]:
                connection, _ = server.accept()
                with connection:
                    received = b""
                    while not _complete(received):
                        received += connection.recv(1 << 16)
                    for _, data in script:
                        connection.sendall(data)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join(10)
        assert not thread.is_alive()


def _complete(request: bytes) -> bool:
    head, found, body = request.partition(b"\r\n\r\n")
    lengths = [int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length: ")]
    return bool(found) and len(body) >= sum(lengths)
