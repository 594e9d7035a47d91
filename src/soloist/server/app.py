"""The ASGI application: routes, keys, origins, limits, and the shape of every error."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

import msgspec

from soloist.errors import UserError
from soloist.server import wire
from soloist.server.exchange import JSON, Disconnected, Exchange, Receive, Scope, Send
from soloist.server.faults import Fault, of_decode_error, of_user_error
from soloist.server.generation import Generation, plan_meta
from soloist.server.log import log_fault
from soloist.server.metrics import Metrics
from soloist.server.openapi import document
from soloist.server.prepare import tokenize, tokenizer_of
from soloist.server.replies import Aborted, Detokenized, ModelCard, ModelList, Status, Tokens
from soloist.server.settings import ServerSettings
from soloist.server.voices import encode
from soloist.server.worker import Worker

Body = TypeVar("Body", bound=msgspec.Struct)
Handler = Callable[[Exchange], Awaitable[None]]

OPEN = ("/", "/health", "/ready", "/openapi.json")
"""Paths that need no key: they tell nothing of what is asked and answered."""

PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; frame-ancestors 'none'"
)


class App:
    """Args: model: as the user named it, which requests may use as well as the served name."""

    def __init__(self, worker: Worker, settings: ServerSettings, model: str):
        self._worker, self._settings = worker, settings
        self.name = settings.served_name or Path(model).name or model
        self._names = {self.name, model}
        self._metrics = Metrics()
        self._text = ThreadPoolExecutor(1, "soloist-text")
        self._created = int(time.time())
        self._routes: dict[str, dict[str, Handler]] = {
            "/": {"GET": self._page},
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/metrics": {"GET": self._show_metrics},
            "/openapi.json": {"GET": self._openapi},
            "/v1/models": {"GET": self._models},
            "/v1/models/{id}": {"GET": self._model},
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._complete},
            "/v1/abort": {"POST": self._abort},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        exchange = Exchange(scope, receive, send)
        route = exchange.path if exchange.path in self._routes else "other"
        if exchange.path.startswith("/v1/models/"):
            route = "/v1/models/{id}"
        # A task, for then whatever a handler raises is a value to look at.
        handled = asyncio.ensure_future(self._handle(exchange, route))
        await asyncio.wait((handled,))
        fault = self._fault(handled.exception(), exchange)
        if fault is not None:
            await exchange.fail(fault)
        self._metrics.responses.add(1, route, str(exchange.status))

    def _fault(self, error: BaseException | None, exchange: Exchange) -> Fault | None:
        if error is None or isinstance(error, Disconnected):
            return None
        if isinstance(error, Fault):
            return error
        if isinstance(error, UserError):
            return of_user_error(error, {})
        log_fault(error, path=exchange.path)
        return Fault(500, f"the server failed ({type(error).__name__}); its log says how")

    async def _handle(self, exchange: Exchange, route: str) -> None:
        if self._answer_preflight(exchange):
            await exchange.reply(b"", kind="text/plain", status=204)
            return
        self._check_key(exchange)
        methods = self._routes.get(route)
        if methods is None:
            raise Fault(404, f"there is nothing at {exchange.path}; /openapi.json lists what there is")
        handler = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if handler is None:
            allowed = ", ".join([*methods, *(["HEAD"] if "GET" in methods else [])])
            raise Fault(405, f"{exchange.path} takes {allowed}, not {exchange.method}", headers={"allow": allowed})
        if exchange.method == "POST":
            await self._read(exchange)
        await handler(exchange)

    async def _read(self, exchange: Exchange) -> None:
        """Other kinds than JSON are refused, also because a browser sends those from any page without asking."""
        kind = exchange.asked.get("content-type", "").split(";")[0].strip().lower()
        if kind != JSON:
            raise Fault(415, f"the content-type is {kind or 'missing'}; send {JSON}")
        await exchange.read(self._settings.max_request_bytes)

    def _answer_preflight(self, exchange: Exchange) -> bool:
        """Let pages of the allowed origins read the answers. True: it was a browser's question whether they may."""
        origin, allowed = exchange.asked.get("origin"), self._settings.cors_origin
        if origin is None or not ("*" in allowed or origin in allowed):
            return False
        exchange.headers += [
            ("access-control-allow-origin", "*" if "*" in allowed else origin),
            ("access-control-expose-headers", "x-request-id, server-timing, retry-after"),
            ("vary", "origin"),
        ]
        if exchange.method != "OPTIONS" or "access-control-request-method" not in exchange.asked:
            return False
        exchange.headers += [
            ("access-control-allow-methods", "GET, POST"),
            ("access-control-allow-headers", exchange.asked.get("access-control-request-headers", "content-type")),
            ("access-control-max-age", "600"),
        ]
        return True

    def _check_key(self, exchange: Exchange) -> None:
        keys = self._settings.api_key
        if not keys or exchange.path in OPEN:
            return
        given = exchange.asked.get("authorization", "").removeprefix("Bearer ").encode()
        if not any([hmac.compare_digest(given, key.encode()) for key in keys]):
            text = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
            raise Fault(401, text, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            raise Fault(404, f"there is no model {name!r} here, only {self.name!r}", "model", "model_not_found")

    # ---- endpoints that generate

    async def _chat(self, exchange: Exchange) -> None:
        await self._generate(exchange, decode(exchange, wire.ChatRequest))

    async def _complete(self, exchange: Exchange) -> None:
        await self._generate(exchange, decode(exchange, wire.CompletionRequest))

    async def _generate(self, exchange: Exchange, request: wire.ChatRequest | wire.CompletionRequest) -> None:
        """Run a request, and cancel it as soon as its client hangs up."""
        self._check_model(request.model)
        generation = Generation(exchange, self._worker, self._settings, self._metrics, self._text)
        running = asyncio.ensure_future(generation.run(request, self.name))
        gone = asyncio.ensure_future(exchange.receive())
        await asyncio.wait((running, gone), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            self._worker.cancel(generation.job, "disconnect")
        gone.cancel()
        await running

    async def _abort(self, exchange: Exchange) -> None:
        wanted = decode(exchange, wire.AbortRequest).id
        job = self._worker.jobs.get(wanted)
        if job is None or not self._worker.cancel(job, "abort"):
            raise Fault(404, f"no request {wanted!r} is running or waiting", "id", "not_running")
        await exchange.reply(encode(Aborted(wanted)))

    # ---- text and tokens

    async def _tokenize(self, exchange: Exchange) -> None:
        request, llm = decode(exchange, wire.TokenizeRequest), self._worker.llm
        self._check_model(request.model)
        ids = await asyncio.get_running_loop().run_in_executor(self._text, tokenize, llm, request)
        reply = Tokens(ids, len(ids), llm.plan.context_length)
        if request.return_token_strs:
            tokenizer = tokenizer_of(llm, "prompt")
            reply.token_strs = [tokenizer.token(token) or "" for token in ids]
        await exchange.reply(encode(reply))

    async def _detokenize(self, exchange: Exchange) -> None:
        request = decode(exchange, wire.DetokenizeRequest)
        self._check_model(request.model)
        tokenizer = tokenizer_of(self._worker.llm, "tokens")
        text = tokenizer.decode(request.tokens, skip_special=bool(request.skip_special_tokens))
        await exchange.reply(encode(Detokenized(text)))

    # ---- the server itself

    async def _models(self, exchange: Exchange) -> None:
        await exchange.reply(encode(ModelList([self._card()])))

    async def _model(self, exchange: Exchange) -> None:
        self._check_model(exchange.path.removeprefix("/v1/models/"))
        await exchange.reply(encode(self._card()))

    def _card(self) -> ModelCard:
        llm = self._worker.llm
        return ModelCard(self.name, self._created, llm.plan.context_length, plan_meta(llm))

    async def _health(self, exchange: Exchange) -> None:
        await self._status(exchange, self._worker.state != "failed")

    async def _ready(self, exchange: Exchange) -> None:
        await self._status(exchange, self._worker.state == "ready")

    async def _status(self, exchange: Exchange, good: bool) -> None:
        worker = self._worker
        status = Status(worker.state, worker.running, worker.waiting)
        await exchange.reply(encode(status), status=200 if good else 503)

    async def _show_metrics(self, exchange: Exchange) -> None:
        worker, metrics = self._worker, self._metrics
        metrics.ready.set(worker.state == "ready")
        metrics.running.set(worker.running)
        metrics.waiting.set(worker.waiting)
        await exchange.reply(metrics.render(), "text/plain; version=0.0.4; charset=utf-8")

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.reply(document())

    async def _page(self, exchange: Exchange) -> None:
        exchange.headers.append(("content-security-policy", PAGE_POLICY))
        await exchange.reply(page(), "text/html; charset=utf-8")


@cache
def page() -> bytes:
    return files("soloist.server").joinpath("page.html").read_bytes()


def decode(exchange: Exchange, kind: type[Body]) -> Body:
    """The request's body.   Raises: Fault 400 that names the field."""
    try:
        return msgspec.json.decode(exchange.body, type=kind)
    except msgspec.DecodeError as error:
        raise of_decode_error(error) from error
    except (RecursionError, UnicodeDecodeError) as error:
        raise Fault(400, f"the body is no JSON that can be read: {error}") from error
