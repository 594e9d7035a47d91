"""Two runs beside each other: refused unless they differ in nothing but their subject, judged pair by pair.

The interval knows the scatter within the runs, not that between them (memory layout, temperature, a neighbour on the
host): so a difference counts only beyond a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from typing import Any

from soloist.bench.records import Flag, RunFile, Verdict
from soloist.bench.summarise import judge
from soloist.errors import UserError

COMPARED = ("tpot_ms", "ttft_ms", "e2e_ms")
TOLERANCE = 0.02
UNEQUAL = {"name"}
"""Fields of the card that may differ: a label."""
SAME, WORSE = 0, 1
RESTLESS = ("busy machine", "throttled", "clocks changed", "drift", "scatter", "cold", "compiled", "prefix hit", "partial")


@dataclass(frozen=True)
class Comparison:
    """subjects: what was said to differ, field -> the two values. verdicts: of B beside A, for every variant and
    workload that both have. flags: of either run, marked A or B. restless: kinds of flags that say the machine was not
    quiet, so that a difference may be its own. code: for CI, 1 if anything is slower or wrong.
    """

    subjects: dict[str, tuple[Any, Any]]
    verdicts: tuple[Verdict, ...]
    flags: tuple[tuple[str, Flag], ...]
    restless: tuple[str, ...]
    tolerance: float
    code: int


def compare(a: RunFile, b: RunFile, subjects: Sequence[str] = (), tolerance: float = TOLERANCE) -> Comparison:
    """Args: subjects: fields that may differ, as `differences` names them; a name stands for all below it.

    Raises: UserError for any other difference, for a subject that does not differ, for runs with nothing in common.
    """
    if not 0 <= tolerance < 1:
        raise UserError(f"tolerance={tolerance:g} must be from 0 to below 1, as 0.02 for 2 %")
    found = differences(a, b)
    for subject in subjects:
        if not any(_covers(subject, field) for field in found):
            near = get_close_matches(subject, found, 1)
            hint = f"did you mean {near[0]}?" if near else f"different are {', '.join(found) or 'no fields'}"
            raise UserError(f"--subject {subject}: does not differ between the runs; {hint}")
    others = {name: pair for name, pair in found.items() if not any(_covers(subject, name) for subject in subjects)}
    if others:
        named = "; ".join(f"{name}: {_short(x)} / {_short(y)}" for name, (x, y) in others.items())
        raise UserError(
            f"the runs differ in more than their subject: {named}; run the same card on the same machine, or say "
            f"which difference is meant: {' '.join(f'--subject {name}' for name in others)}"
        )
    verdicts = tuple(_verdicts(a, b, tolerance))
    if not verdicts:
        raise UserError("the runs have no variant and workload of the same name with measured requests")
    bad = any(v.conclusion == "slower" or v.conclusion.startswith("failed") for v in verdicts) or not b.passed
    flags = tuple((mark, flag) for mark, run in (("A", a), ("B", b)) for flag in run.flags)
    restless = tuple(kind for kind in RESTLESS if any(flag.kind == kind for _, flag in flags))
    return Comparison(found, verdicts, flags, restless, tolerance, WORSE if bad else SAME)


def differences(a: RunFile, b: RunFile) -> dict[str, tuple[Any, Any]]:
    """Name -> the two values, of every field of card, machine and server that differs. Names are paths such as
    `workloads.code.output_tokens`, `variants.plain.drafter`, `machine.commit`, `server.owned_by`.
    """
    first, second = dict(_fields(a)), dict(_fields(b))
    missing = object()
    found = {}
    for name in dict.fromkeys([*first, *second]):
        x, y = first.get(name, missing), second.get(name, missing)
        if x != y and name not in UNEQUAL:
            found[name] = (None if x is missing else x, None if y is missing else y)
    return found


def _fields(run: RunFile) -> Iterator[tuple[str, Any]]:
    """Lists of tables by the tables' names: an item may stand elsewhere in the other card."""
    card = asdict(run.card)
    for kind in ("workloads", "variants"):
        card[kind] = {each["name"]: each for each in card[kind]}
    yield from _flat("", card)
    yield from _flat("machine", asdict(replace(run.machine, unknown={})))
    if run.card.target == "http":
        yield from _flat("server", {name: value for plan in run.plans.values() for name, value in plan.items()})


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            if name == "name" and path:
                continue
            yield from _flat(f"{path}.{name}" if path else str(name), each)
    else:
        yield path, value


def _covers(subject: str, field: str) -> bool:
    """`drafter` names `variants.plain.drafter`, `variants` everything below it."""
    return f".{subject}." in f".{field}."


def _verdicts(a: RunFile, b: RunFile, tolerance: float) -> Iterator[Verdict]:
    """Variants of one name, or the only ones."""
    mine, other = ([v.name for v in run.card.variants] for run in (a, b))
    pairs = [(mine[0], other[0])] if len(mine) == len(other) == 1 else [(name, name) for name in other]
    for workload in b.card.workloads:
        for before, after in pairs:
            first, second = list(a.of(before, workload.name)), list(b.of(after, workload.name))
            if first and second:
                for metric in COMPARED:
                    yield judge(first, second, metric, tolerance)


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
