"""The OpenAPI document, made from the types that decode requests and encode answers, so it cannot say other than they do."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from soloist import __version__
from soloist.server import replies, wire

REQUESTS = (wire.ChatRequest, wire.CompletionRequest, wire.TokenizeRequest, wire.DetokenizeRequest, wire.AbortRequest)
REPLIES = (
    replies.ChatCompletion, replies.ChatChunk, replies.Completion, replies.CompletionChunk, replies.ModelCard,
    replies.ModelList, replies.Tokens, replies.Detokenized, replies.Aborted, replies.Status, replies.Error,
)  # fmt: skip

WORDS = {
    400: "A field is wrong or not supported; `param` names it", 401: "No key, or a wrong one",
    404: "No such model, request or path", 405: "Not with this method",
    409: "The request was aborted before it began, or its id is in use", 413: "The body is too large",
    415: "The body is not application/json", 500: "The server failed", 503: "Loading, full or ending; see Retry-After",
    504: "The request took longer than the server allows",
}  # fmt: skip


@cache
def document() -> bytes:
    _, components = msgspec.json.schema_components([*REQUESTS, *REPLIES], ref_template="#/components/schemas/{name}")
    paths = {
        "/v1/chat/completions": _generates("Answer a conversation", "ChatRequest", "ChatCompletion"),
        "/v1/completions": _generates("Continue a text", "CompletionRequest", "Completion"),
        "/v1/abort": _takes("End a request after its current round", "AbortRequest", "Aborted"),
        "/v1/models": _gives("The model, with the length of its context", _json("ModelList"), 401, 503),
        "/v1/models/{id}": _gives("The same by name", _json("ModelCard"), 401, 404, 503, parameters=[_ID]),
        "/tokenize": _takes("Token ids of a text or a conversation", "TokenizeRequest", "Tokens"),
        "/detokenize": _takes("The text of token ids", "DetokenizeRequest", "Detokenized"),
        "/health": _status("Whether the process works"),
        "/ready": _status("Whether requests are taken: the model is loaded and warm"),
        "/metrics": _gives("Counts for Prometheus", {"text/plain": {"schema": {"type": "string"}}}, 401),
        "/openapi.json": _gives("This document", {"application/json": {"schema": {"type": "object"}}}),
        "/": _gives("A page to chat with the model", {"text/html": {"schema": {"type": "string"}}}),
    }
    return msgspec.json.encode({
        "openapi": "3.1.0",
        "info": {
            "title": "soloist", "version": __version__,
            "description": "OpenAI's API for one model that answers one request at a time. Fields beyond OpenAI's own are "
            "described where they are listed; any other field is refused with a 400 that names it.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    })  # fmt: skip


_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
_EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
"""One event of a stream; its data is a ChatChunk or CompletionChunk as JSON, an Error, or `[DONE]`."""

_REQUEST_ID = {
    "name": "x-request-id", "in": "header", "required": False,
    "description": "The answer's id, by which /v1/abort knows the request",
    "schema": {"type": "string", "pattern": "^[!-~]{1,128}$"},
}  # fmt: skip


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _errors(*statuses: int) -> dict[str, Any]:
    return {str(status): {"description": WORDS[status], "content": _json("Error")} for status in statuses}


def _gives(summary: str, content: dict[str, Any], *errors: int, **more: Any) -> dict[str, Any]:
    responses = {"200": {"description": "OK", "content": content}, **_errors(*errors)}
    return {"get": {"summary": summary, "responses": responses, **more}}


def _status(summary: str) -> dict[str, Any]:
    responses = {
        "200": {"description": "Yes", "content": _json("Status")},
        "503": {"description": "No", "content": _json("Status")},
    }
    return {"get": {"summary": summary, "responses": responses}}


def _takes(summary: str, request: str, reply: str, *errors: int, **more: Any) -> dict[str, Any]:
    body = {"required": True, "content": _json(request)}
    ok = {"200": {"description": "OK", "content": _json(reply)}}
    responses = {**ok, **_errors(400, 401, 404, 413, 415, 503, *errors)}
    return {"post": {"summary": summary, "requestBody": body, "responses": responses, "security": [{}, {"key": []}], **more}}


def _generates(summary: str, request: str, reply: str) -> dict[str, Any]:
    described = _takes(summary, request, reply, 409, 500, 504, parameters=[_REQUEST_ID])
    described["post"]["responses"]["200"] = {
        "description": "The answer; with `stream` one event a round, then `[DONE]`",
        "content": {**_json(reply), "text/event-stream": {"schema": _EVENT}},
    }
    return described
