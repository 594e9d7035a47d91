"""How far a measured number may be carried: TPOT and acceptance over domains, context lengths and temperatures.

A number belongs to its workload. So no single one is given for planning, but the range over everything that was
measured; and for what was not varied, the words that nothing is known of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from soloist.bench.metrics import METRICS, tpot_ms
from soloist.bench.records import Distribution, Ratio, RequestRecord, RunFile
from soloist.bench.stats import distribution, ratio

AXES = ("domain", "context", "temperature")
PRESETS = {"domain": "real", "context": "depth", "temperature": "sampling"}
"""Which preset varies an axis."""


@dataclass(frozen=True)
class Subject:
    """What a range is about. Requests of different subjects are never put together."""

    model: str
    weights: str
    machine: str
    variant: str


@dataclass(frozen=True)
class Group:
    """The requests of a subject at one value of an axis."""

    value: str
    requests: int
    tpot_ms: Distribution | None
    acceptance_length: Ratio | None


@dataclass(frozen=True)
class Transfer:
    """What is known of a subject. axes: name -> groups, in ascending order. tpot_ms, acceptance_length: from the lowest
    interval's low end to the highest one's high end over all groups of all axes, None where no range may be given;
    refused then says why.
    """

    subject: Subject
    axes: dict[str, tuple[Group, ...]]
    tpot_ms: tuple[float, float] | None
    acceptance_length: tuple[float, float] | None
    refused: str = ""

    @property
    def not_varied(self) -> list[str]:
        return [axis for axis in AXES if len(self.axes[axis]) < 2]


def transfers(runs: Sequence[RunFile]) -> list[Transfer]:
    """One for every variant of every model on every machine, over all the runs."""
    pooled: dict[Subject, list[tuple[RunFile, RequestRecord]]] = {}
    for run in runs:
        machine = run.machine.gpus[0] if run.machine.gpus and not _on_cpu(run) else run.machine.cpu
        for record in run.requests:
            if record.error is None:
                subject = Subject(run.card.model, run.card.weights, machine, record.variant)
                pooled.setdefault(subject, []).append((run, record))
    return [_transfer(subject, pairs) for subject, pairs in pooled.items()]


def _on_cpu(run: RunFile) -> bool:
    return any(str(plan.get("device", "")).startswith("cpu") for plan in run.plans.values())


def _transfer(subject: Subject, pairs: list[tuple[RunFile, RequestRecord]]) -> Transfer:
    axes = {axis: _groups(axis, pairs) for axis in AXES}
    refused = _refusal(subject, [run for run, _ in pairs])
    every = [group for groups in axes.values() for group in groups]
    return Transfer(
        subject, axes,
        None if refused else _range(group.tpot_ms for group in every),
        None if refused else _range(group.acceptance_length for group in every),
        refused,
    )  # fmt: skip


def _refusal(subject: Subject, runs: list[RunFile]) -> str:
    if any(is_synthetic(run, subject.variant) for run in runs):
        return "its acceptance is synthetic"
    if any(run.card.random_weights for run in runs):
        return "its weights are random"
    if any(has_failed(run, subject.variant) for run in runs):
        return "its text was wrong"
    return ""


def is_synthetic(run: RunFile, variant: str) -> bool:
    return any(v.name == variant and v.synthetic for v in run.card.variants)


def has_failed(run: RunFile, variant: str) -> bool:
    """Whether a check of the variant failed, or its text differs from plain decoding."""
    failed = any(c.variant == variant and c.passed is False for c in run.checks)
    return failed or any(v.variant == variant and v.conclusion.startswith("failed") for v in run.verdicts)


def _groups(axis: str, pairs: list[tuple[RunFile, RequestRecord]]) -> tuple[Group, ...]:
    found: dict[tuple[float, str], list[RequestRecord]] = {}
    for run, record in pairs:
        value = _value(axis, run, record)
        if value is not None:
            found.setdefault(value, []).append(record)
    return tuple(_group(name, records) for (_, name), records in sorted(found.items()))


def _value(axis: str, run: RunFile, record: RequestRecord) -> tuple[float, str] | None:
    """Where a request lies on an axis: what to sort by, and what to call it."""
    if axis == "domain":
        return (0.0, record.domain or record.workload)
    if axis == "temperature":
        heat = next((w.temperature for w in run.card.workloads if w.name == record.workload), None)
        return None if heat is None else (heat, f"{heat:g}")
    if record.prompt_tokens is None:
        return None
    octave = max(record.prompt_tokens, 1).bit_length() - 1
    return (octave, f"{1 << octave} to {(2 << octave) - 1}")


def _group(name: str, records: list[RequestRecord]) -> Group:
    times = [ms for ms in map(tpot_ms, records) if ms is not None]
    pairs = [pair for pair in map(METRICS["acceptance_length"].of, records) if pair is not None]
    return Group(name, len(records), distribution([[ms] for ms in times]), ratio(pairs))  # type: ignore[arg-type]


def _range(found: Iterable[Distribution | Ratio | None]) -> tuple[float, float] | None:
    """From the lowest end of an interval to the highest; the value itself where one request gives no interval."""
    known = [each for each in found if each is not None]
    lows = [each.centre if each.low is None else each.low for each in known]
    highs = [each.centre if each.high is None else each.high for each in known]
    return (min(lows), max(highs)) if known else None
