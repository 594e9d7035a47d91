"""How to serve, apart from the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from soloist.errors import UserError


@dataclass(frozen=True)
class ServerSettings:
    """Every field is a flag of `soloist serve`. Times in seconds; 0 for request_timeout means no limit."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str | None = None
    api_key: tuple[str, ...] = ()
    cors_origin: tuple[str, ...] = ()
    max_queue: int = 16
    request_timeout: float = 600.0
    drain_timeout: float = 3.0
    max_request_bytes: int = 16 << 20
    log_text: bool = False

    def __post_init__(self) -> None:
        limits = {"port": 65535, "max_queue": 1 << 16, "request_timeout": 1e9, "drain_timeout": 1e9, "max_request_bytes": 1 << 40}
        for name, most in limits.items():
            value = getattr(self, name)
            if not math.isfinite(value) or not 0 <= value <= most:
                raise UserError(f"{name}={value} must be a number from 0 to {most:g}")
        for name in ("api_key", "cors_origin"):
            texts: Sequence[str] = getattr(self, name)
            if not all(text and text.isascii() for text in texts):
                raise UserError(f"{name} is empty or holds other characters than ASCII; give it as plain text")
            object.__setattr__(self, name, tuple(texts))
