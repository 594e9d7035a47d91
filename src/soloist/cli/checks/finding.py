"""One thing that a check found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """verdict: `ok`, `slow` for what costs speed here, `note` for the rest. remedy: what to do, empty for `ok`."""

    topic: str
    verdict: str
    found: str
    remedy: str = ""


def ok(topic: str, found: str) -> Finding:
    return Finding(topic, "ok", found)


def slow(topic: str, found: str, remedy: str) -> Finding:
    return Finding(topic, "slow", found, remedy)


def note(topic: str, found: str, remedy: str = "") -> Finding:
    return Finding(topic, "note", found, remedy)
