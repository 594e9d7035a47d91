"""From the events of a request to its record."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from soloist.bench.records import Block, RequestRecord
from soloist.bench.target import Ending, Event


@dataclass(frozen=True)
class Place:
    """Where a request stands in its run; fields as in RequestRecord."""

    variant: str
    workload: str
    domain: str
    prompt: int
    repeat: int
    at_s: float


@dataclass(frozen=True)
class Answer:
    """What was generated. token_ids: None unless the target told every one."""

    record: RequestRecord
    token_ids: tuple[int, ...] | None
    text: str


def record_events(events: Iterable[Event], place: Place) -> Answer:
    """Consume the events of one request. A target that ends without an `ending` has failed."""
    seen: list[Event] = []
    for event in events:
        seen.append(event)
        if event.ending is not None:
            break
    last = seen[-1] if seen else Event(0.0)
    ending = last.ending or Ending(None, error="the answer broke off: no end came")
    blocks = [event for event in seen if event.n or event.token_ids or event.text]
    ids = _ids(blocks)
    text = "".join(event.text for event in seen)
    first, rounds = (blocks[0].t_ms if blocks else None), _told(blocks[1:])
    record = RequestRecord(
        variant=place.variant,
        workload=place.workload,
        domain=place.domain,
        prompt=place.prompt,
        repeat=place.repeat,
        at_s=place.at_s,
        prompt_tokens=ending.prompt_tokens,
        output_tokens=ending.output_tokens,
        count_source=ending.count_source,
        ttft_ms=first,
        first_tokens=_total([_count(event) for event in blocks if event.t_ms == first]),
        last_ms=blocks[-1].t_ms if blocks else None,
        first_text_ms=next((event.t_ms for event in seen if event.text), None),
        first_answer_ms=next((event.t_ms for event in seen if event.text and not event.reasoning), None),
        end_ms=last.t_ms,
        rounds=None if rounds is None else len(rounds),
        drafted=None if rounds is None else _total([event.drafted for event in rounds]),
        accepted=None if rounds is None else _total([event.accepted for event in rounds]),
        finish_reason=ending.finish_reason,
        token_ids_sha256=None if ids is None else ids_sha256(ids),
        text_sha256=hashlib.sha256(text.encode()).hexdigest(),
        cached_tokens=ending.cached_tokens,
        compiled=ending.compiled,
        error=ending.error,
        blocks=tuple(
            Block(e.t_ms, _count(e), e.drafted, e.accepted, e.round_ms, e.server_ms) for e in blocks
        ),
    )  # fmt: skip
    return Answer(record, ids, text)


def ids_sha256(token_ids: Sequence[int]) -> str:
    """Of the ids as decimal numbers with spaces between: any language can repeat it."""
    return hashlib.sha256(" ".join(map(str, token_ids)).encode()).hexdigest()


def _count(event: Event) -> int | None:
    return event.n if event.token_ids is None else len(event.token_ids)


def _ids(blocks: list[Event]) -> tuple[int, ...] | None:
    """None if a block carries text or a count without ids: then some are missing."""
    if any(event.token_ids is None for event in blocks):
        return None
    return tuple(token for event in blocks for token in event.token_ids or ())


def _told(blocks: list[Event]) -> list[Event] | None:
    """The rounds among the blocks, None unless the target told every one of them."""
    return None if any(event.drafted is None or event.accepted is None for event in blocks) else blocks


def _total(counts: list[int | None]) -> int | None:
    """Their sum, None if one is unknown or there is none."""
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None
