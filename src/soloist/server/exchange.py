"""One HTTP request and its response, over ASGI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

from soloist.server.faults import Fault

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON, SSE = "application/json", "text/event-stream; charset=utf-8"


class Disconnected(Exception):
    """The client has gone before its request was complete."""


class Exchange:
    """headers: sent with every response of this exchange, whatever becomes of it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send):
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.client: str = ":".join(map(str, scope.get("client") or ()))
        self.asked: dict[str, str] = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.headers: list[tuple[str, str]] = []
        self.status = 0
        self.body = b""
        self.receive, self._send = receive, send

    async def read(self, limit: int) -> None:
        """Read the body.   Raises: Fault 413 beyond the limit of bytes; Disconnected."""
        if int(self.asked.get("content-length", "0")) > limit:
            raise self._too_large(limit)
        parts, size, more = [], 0, True
        while more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise self._too_large(limit)
            more = message.get("more_body", False)
        self.body = b"".join(parts)

    def _too_large(self, limit: int) -> Fault:
        self.headers.append(("connection", "close"))  # what is left of the body is not read
        return Fault(413, f"the request is larger than {limit} bytes, the server's --max-request-bytes", code="too_large")

    async def reply(self, body: bytes, kind: str = JSON, status: int = 200, more: Mapping[str, str] | None = None) -> None:
        """The whole response."""
        await self.start(status, kind, [*(more or {}).items(), ("content-length", str(len(body)))])
        await self._send({"type": "http.response.body", "body": body})

    async def start(self, status: int, kind: str, more: Iterable[tuple[str, str]] = ()) -> None:
        self.status = status
        pairs = [("content-type", kind), *self.headers, *more]
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, data: bytes, more: bool = True) -> None:
        """A part of the response's body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def fail(self, fault: Fault) -> None:
        """The fault as a response; within a stream as its last message."""
        if self.status:
            await self.send(b"data: " + fault.body() + b"\n\n", more=False)
        else:
            await self.reply(fault.body(), status=fault.status, more=fault.headers)
