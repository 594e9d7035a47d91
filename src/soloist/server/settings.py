"""How to serve, apart from the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """Every field is a flag of `soloist serve`. Times in seconds; 0 for request_timeout means no limit."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str | None = None
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_queue: int = 16
    request_timeout: float = 600.0
    max_request_bytes: int = 16 << 20
    drain_timeout: float = 3.0
    log_text: bool = False
