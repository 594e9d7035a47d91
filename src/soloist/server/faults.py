"""What goes wrong with a request, in OpenAI's shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from soloist.errors import UserError
from soloist.server.wire import ChatRequest, CompletionRequest

KINDS = {401: "authentication_error", 404: "not_found_error", 500: "server_error", 503: "overloaded_error",
         504: "timeout_error"}  # fmt: skip
_FIELDS = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}

NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's clients repeat a request that failed with 409 or 5xx, unless they are told that it is no use."""


@dataclass(eq=False)
class Fault(Exception):
    """An HTTP error. param: the field at fault; code: a word for programs; headers: to send with it."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """`{"error": {...}}`, the same before a stream and within one."""
        kind = KINDS.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def of_user_error(error: UserError, fields: Mapping[str, str]) -> Fault:
    """400 for what the engine refuses. fields: its words for things -> the request's fields of other names."""
    message = str(error)
    found = re.match(r"(?:the )?([a-z_]+)", message)
    word = found[1] if found else ""
    return Fault(400, message, param=fields.get(word, word if word in _FIELDS else None))


def of_decode_error(error: msgspec.DecodeError) -> Fault:
    """400 for a body that is no JSON, or not of the form that the endpoint takes."""
    message = str(error)
    unknown = re.search(r"unknown field `([^`]*)`", message)
    missing = re.search(r"required field `([^`]*)`", message)
    path = re.search(r"`\$([^`]*)`", message)
    place = (path[1] if path else "").lstrip(".")
    named = (unknown or missing or ("", ""))[1]
    param = ".".join(part for part in (place, named) if part) or None
    if unknown:
        message = f"{param} is not supported; /openapi.json lists the fields"
    return Fault(400, message, param=param, code="unsupported_field" if unknown else None)
