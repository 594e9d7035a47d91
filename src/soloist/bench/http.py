"""An OpenAI-compatible server as a Target: SGLang, vLLM, llama-server, or soloist itself.

The socket is read directly, so that every packet has the time of its arrival; see `sse.py` for what is made of it. Each
request has a connection of its own, opened before the clock starts. What a server can do is found out by asking: token
ids as prompt, counts in every chunk. A request refused with a 4xx, or with the 500 of a server that stumbles over what it
does not know, is asked again in the next simpler way, which happens in the warm-up; what worked is kept, and `dialect` says
what it is.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any, Protocol
from urllib.parse import urlsplit

from soloist import __version__
from soloist.bench.sse import DONE, Packet, error_text, read_answer
from soloist.bench.target import Ending, Event, Prompt
from soloist.config import SamplingParams
from soloist.errors import UserError

COUNTING: dict[str, dict[str, Any]] = {
    "counts in every chunk": {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
        "timings_per_token": True,
    },
    "usage at the end": {"stream_options": {"include_usage": True}},
    "no counts": {},
}
"""What to ask for, best first. Fields that a server does not know it ignores or refuses."""

PENALTIES: dict[str, tuple[str, ...]] = {
    "both names of the penalty": ("repetition_penalty", "repeat_penalty"),
    "repetition_penalty": ("repetition_penalty",),
    "no penalty": (),
}
"""What to call it, so that a server's own default, often another than 1, does not change the text."""

REFUSED = (400, 404, 405, 415, 422, 501)
STUMBLED = 500

DRAWING = ("seed", "top_p", "top_k", "min_p")

DEFAULTS = {f.name: f.default if f.default is not MISSING else None for f in fields(SamplingParams)}


class Connection(Protocol):
    """What is used of a socket."""

    def sendall(self, data: bytes, /) -> None: ...

    def recv_into(self, buffer: memoryview, /) -> int: ...

    def close(self) -> None: ...


def connect(host: str, port: int, secure: bool, timeout_s: float) -> Connection:
    sock = socket.create_connection((host, port), timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ssl.create_default_context().wrap_socket(sock, server_hostname=host) if secure else sock


class HttpTarget:
    """Args: url: `http://host:port`, with or without `/v1`; model: its name there, None = the first one it lists.

    count_text: tokens of a text by the model's tokenizer, a second witness where the server counts nothing. timeout_s:
    longest silence. connect, clock (seconds): as above and perf_counter, or a test's.
    Raises: UserError if nobody answers there, or the server does not have the model.
    """

    name = "http"

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        count_text: Callable[[str], int] | None = None,
        timeout_s: float = 600.0,
        connect: Callable[[str, int, bool, float], Connection] = connect,
        clock: Callable[[], float] = time.perf_counter,
    ):
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise UserError(f"--url {url}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"--url {url}: must look like http://host:port")
        self.url, self._host, self._secure = url, parts.hostname, parts.scheme == "https"
        self._port = port or (443 if self._secure else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._api_key, self._timeout_s, self._connect, self._clock = api_key, timeout_s, connect, clock
        self.count_text, self.owned_by = count_text, ""
        self._dialect: tuple[str, str, str] | None = None
        self.model = self._find_model(model)

    @property
    def dialect(self) -> str:
        """How this server is spoken to: what a prompt is sent as, where token counts come from, what a penalty is called."""
        return "not asked yet" if self._dialect is None else ", ".join(self._dialect)

    def serve(self, prompt: Prompt, sampling: Mapping[str, Any]) -> Iterator[Event]:
        """See Target. The events come when the answer is complete; their times are those of arrival."""
        yield from self._ask(prompt, sampling)

    def plan(self) -> dict[str, Any]:
        """The model's name and owner there (vllm, sglang, ...), and how the server is spoken to."""
        return {"served_model": self.model, "owned_by": self.owned_by, "dialect": self.dialect}

    def close(self) -> None:
        """Nothing stays open between requests."""

    def _ask(self, prompt: Prompt, sampling: Mapping[str, Any]) -> list[Event]:
        """Send the request, in simpler and simpler ways while the server refuses it."""
        offered = prompt_fields(prompt)
        ways = [(kind, counting, naming) for kind in offered for counting in COUNTING for naming in PENALTIES]
        if self._dialect is not None and self._dialect[0] in offered:
            ways = [self._dialect]
        refusals: dict[str, None] = {}
        for kind, counting, naming in ways:
            endpoint, content = offered[kind]
            penalties = dict.fromkeys(PENALTIES[naming], sampling.get("repetition_penalty", 1.0))
            asked = {**content, **request_fields(sampling), **penalties, **COUNTING[counting]}
            body = {"model": self.model, "stream": True, **asked}
            status, packets, error = self._exchange("POST", f"/v1/{endpoint}", body)
            if status in REFUSED or status == STUMBLED and self._dialect is None:
                refusals[f"{status} for {kind}: {_message(packets)}"] = None
                continue
            if status == 200 and error is None:
                self._dialect = (kind, counting, naming)
                return read_answer(packets, sampling.get("max_tokens"), self.count_text)
            return _failed(packets, error or f"the server answered {status}: {_message(packets)}")
        return _failed([], f"the server refused the request: {'; '.join(refusals)}")

    def _find_model(self, wanted: str | None) -> str:
        status, packets, error = self._exchange("GET", "/v1/models", None)
        if error is not None:
            raise UserError(f"no server answers at {self.url} ({error}); start one, or correct --url")
        try:
            listed = {str(entry["id"]): entry for entry in json.loads(b"".join(data for _, data in packets))["data"]}
            names = list(listed)
        except (ValueError, KeyError, TypeError) as malformed:
            if wanted is not None:
                return wanted
            raise UserError(f"{self.url}/v1/models answers {status} and lists no model; name one with model=") from malformed
        if wanted is None and not names:
            raise UserError(f"{self.url} lists no model; name one with model=")
        if wanted is not None and names and wanted not in names:
            raise UserError(f"{self.url} has no model {wanted!r}; it has {', '.join(names)}")
        chosen = wanted or names[0]
        self.owned_by = str(listed.get(chosen, {}).get("owned_by", ""))
        return chosen

    def _exchange(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, list[Packet], str | None]:
        """One request: status, 0 without an answer; what came, timed since it was sent; what went wrong on the way."""
        head, content = self._request(method, path, body)
        try:
            sock = self._connect(self._host, self._port, self._secure, self._timeout_s)
        except OSError as error:
            return 0, [], _reason(error)
        packets: list[Packet] = []
        status, wire = 0, _StampedWire(sock, self._clock)
        with contextlib.closing(sock):
            begun = self._clock()
            try:
                sock.sendall(head + content)
                response = http.client.HTTPResponse(wire, method=method)  # type: ignore[arg-type]
                response.begin()
                status = response.status
                while data := response.read1(1 << 16):
                    packets.append(((wire.at - begun) * 1e3, data))
                    if data.endswith(_ENDS):
                        break  # some servers keep the connection open after their last word
            except (OSError, http.client.HTTPException) as error:
                return status, packets, _reason(error)
        return status, packets, None

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[bytes, bytes]:
        content = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{method} {self._path}{path} HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            f"User-Agent: soloist/{__version__}",
            "Accept: text/event-stream, application/json",
            "Connection: close",
        ]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
        if self._api_key is not None:
            lines.append(f"Authorization: Bearer {self._api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode(), content


_ENDS = tuple(f"data: {DONE}{end}".encode() for end in ("\n\n", "\r\n\r\n"))


class _StampedWire(io.RawIOBase):
    """A connection as http.client reads it. at: the clock when the last bytes came."""

    def __init__(self, sock: Connection, clock: Callable[[], float]):
        self._sock, self._clock, self.at = sock, clock, 0.0

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self, 1 << 16)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = self._sock.recv_into(buffer)
        self.at = self._clock()
        return size


def prompt_fields(prompt: Prompt) -> dict[str, tuple[str, dict[str, Any]]]:
    """What a prompt can be sent as -> endpoint and fields, the exact one first."""
    ways: dict[str, tuple[str, dict[str, Any]]] = {}
    if prompt.token_ids is not None:
        ways["token ids"] = "completions", {"prompt": list(prompt.token_ids)}
    if prompt.messages is not None:
        ways["messages"] = "chat/completions", {"messages": [dict(message) for message in prompt.messages]}
    if prompt.text is not None:
        ways["text"] = "completions", {"prompt": prompt.text}
    assert ways, prompt
    return ways


def request_fields(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """What the server has to be told: many refuse fields they do not know, so those that change nothing stay out.

    Temperature and top_p are sent all the same, for servers have defaults of their own; what only random draws look at
    is left out of greedy decoding.
    """
    temperature = sampling.get("temperature", 0.0)
    idle = DRAWING if temperature == 0 else ()
    told = {"temperature": temperature} | ({} if temperature == 0 else {"top_p": 1.0})
    for name, value in sampling.items():
        if value is not None and name not in idle and (name in told or value != DEFAULTS.get(name)):
            told[name] = list(value) if isinstance(value, tuple) else value
    return told


def _failed(packets: list[Packet], error: str) -> list[Event]:
    """The events of a request that did not get its whole answer."""
    *events, last = read_answer(packets)
    ending = last.ending or Ending(None)
    return [*events, Event(last.t_ms, ending=Ending(None, ending.prompt_tokens, ending.output_tokens, error=error))]


def _message(packets: list[Packet]) -> str:
    body = b"".join(data for _, data in packets)
    try:
        content = json.loads(body)
    except ValueError:
        return " ".join(body.decode("utf-8", "replace").split())[:200]
    return error_text(content) if isinstance(content, dict) else str(content)[:200]


def _reason(error: OSError | http.client.HTTPException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
