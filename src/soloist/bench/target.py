"""What is measured: something that serves one request and tells, event by event, when its tokens came.

The in-process engine (`inprocess.py`) and the client for OpenAI-compatible servers (`http.py`) are Targets, and
`recording.py` turns the events of either into the same RequestRecord.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Prompt:
    """What is sent. At least one of the three is set; a target sends the first that it can: ids, messages, text."""

    name: str
    domain: str
    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True)
class Event:
    """Something arrived. t_ms: on a monotonic clock, since the request was sent; for a server two events of one packet
    share it. token_ids: what came, None where the target does not tell ids; n: how many tokens, None where it does not
    tell that either. text: visible text. reasoning: whether the text is thought rather than answer. drafted, accepted,
    round_ms, server_ms: see `records.Block`. An event without tokens and text (a role, a usage, a keep-alive) is no block.
    """

    t_ms: float
    token_ids: tuple[int, ...] | None = None
    n: int | None = None
    text: str = ""
    reasoning: bool = False
    drafted: int | None = None
    accepted: int | None = None
    round_ms: float | None = None
    server_ms: float | None = None
    ending: Ending | None = None


@dataclass(frozen=True)
class Ending:
    """Carried by the last event of a request, whose t_ms is the end of the answer. output_tokens: the target's own
    count, None where it gives none (it is never filled with what was asked for). count_source: `engine`, `token ids`
    or `usage`. compiled: kernels compiled or graphs captured during the request, None where the target cannot tell.
    """

    finish_reason: str | None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    count_source: str | None = None
    cached_tokens: int | None = None
    compiled: int | None = None
    error: str | None = None


class Target(Protocol):
    """Serves one request at a time."""

    name: str
    """`in-process` or `http`; part of the card."""

    def serve(self, prompt: Prompt, sampling: Mapping[str, Any]) -> Iterator[Event]:
        """Send a request, yield its events in order; the last carries `ending`.

        Args: sampling: SamplingParams fields by name, max_tokens, ignore_eos and seed among them.
        A request that fails ends with `ending.error`. Closing the iterator cancels the request.
        """
        ...

    def plan(self) -> dict[str, Any]:
        """How it runs, as far as it tells; kept with the results."""
        ...

    def close(self) -> None:
        """Free the model or the connection."""
        ...
