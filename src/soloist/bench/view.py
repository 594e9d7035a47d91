"""What a report shows, apart from how: tables and charts made of runs. HTML, Markdown and PNG are drawn from these.

Whatever makes a number mean less stands beside it: each variant's name carries `synthetic` or `FAILED`, and each run
its labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from soloist.bench.metrics import METRICS, tpot_ms
from soloist.bench.records import Condition, Distribution, Ratio, RequestRecord, RunFile, Summary
from soloist.bench.transfer import AXES, PRESETS, Group, Transfer, has_failed, is_synthetic

Point = tuple[float, float]


@dataclass(frozen=True)
class Table:
    """rows: as many texts as header. The first column names the row; the others are numbers if `numeric`."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class Series:
    """style: `dots`, `line`, `steps` (constant after each point) or `bars`. place: of its variant in the card, which has one
    colour in all charts.
    """

    name: str
    points: tuple[Point, ...]
    style: str
    place: int


@dataclass(frozen=True)
class Chart:
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    note: str = ""
    log_x: bool = False
    y_max: float | None = None


@dataclass(frozen=True)
class Strip:
    """One request as time passes. ttft_ms: the end of prefill; blocks: (begin, end, tokens) of each block after it."""

    name: str
    ttft_ms: float
    blocks: tuple[tuple[float, float, int | None], ...]


@dataclass(frozen=True)
class TimeLine:
    title: str
    strips: tuple[Strip, ...]
    note: str = ""


@dataclass(frozen=True)
class Section:
    """One run. labels: what its numbers must not be quoted without. sentences: its verdicts."""

    title: str
    subtitle: str
    labels: tuple[str, ...]
    sentences: tuple[str, ...]
    tables: tuple[Table, ...]
    charts: tuple[Chart | TimeLine, ...]
    details: tuple[Table, ...] = field(default=())


def section(run: RunFile) -> Section:
    card = run.card
    charts: list[Chart | TimeLine] = []
    for workload in card.workloads:
        charts += [c for c in (tpot_chart(run, workload.name), rounds_chart(run, workload.name),
                               places_chart(run, workload.name)) if c.series]  # fmt: skip
    charts += [c for c in (context_chart(run),) if c.series] + [t for t in (time_line(run),) if t.strips]
    device = next(iter(run.machine.gpus), run.machine.cpu)
    return Section(
        title=f"{card.name} ({run.card_hash})",
        subtitle=f"{card.model}, weights {card.weights}; {device}; {card.target}; {run.started}, {run.duration_s:.0f} s",
        labels=labels(run),
        sentences=tuple(verdicts(run)),
        tables=(headline(run), *([checks(run)] if run.checks else [])),
        charts=tuple(charts),
        details=(*(distributions(run, w.name) for w in card.workloads), card_table(run), machine_table(run),
                 conditions_table(run), *plan_tables(run)),
    )  # fmt: skip


def labels(run: RunFile) -> tuple[str, ...]:
    """What must be read before any number of the run."""
    found = []
    if not run.passed:
        found.append("FAILED: a check did not pass; no speed-up may be quoted")
    if run.partial:
        found.append("PARTIAL: the run was ended before its time")
    if any(flag.kind == "one rank alone" for flag in run.flags):
        found.append("ONE RANK ALONE: times are those of its computation, without communication; the text means nothing")
    if run.card.random_weights:
        found.append("RANDOM WEIGHTS: times are those of the shapes, acceptance means nothing")
    synthetic = [v.name for v in run.card.variants if v.synthetic]
    if synthetic:
        found.append(f"SYNTHETIC ACCEPTANCE in {', '.join(synthetic)}: scripted, not a drafter's skill")
    failed = sum(s.failed for s in run.summaries)
    if failed:
        found.append(f"{failed} REQUESTS FAILED")
    counts = [f" ({flag.requests} requests)" if flag.requests else "" for flag in run.flags]
    return (*found, *(f"{flag.kind}: {flag.detail}{count}" for flag, count in zip(run.flags, counts, strict=True)))


def called(run: RunFile, variant: str) -> str:
    """A variant's name with what its numbers must not be read without."""
    marks = ["synthetic"] * is_synthetic(run, variant) + ["FAILED"] * has_failed(run, variant)
    return f"{variant} [{', '.join(marks)}]" if marks else variant


def verdicts(run: RunFile) -> Iterable[str]:
    for v in run.verdicts:
        told = f"{v.workload}: {called(run, v.variant)} against {v.baseline}, {v.metric}, {v.pairs} pairs: {v.conclusion}"
        if v.speedup is not None and v.low is not None and v.high is not None:
            told += f", {v.speedup:.3f}x [{v.low:.3f}, {v.high:.3f}]"
            told += "" if v.p_value is None else f", p = {v.p_value:.2g}"
        yield told


# ---- tables ----------------------------------------------------------------------------------------------------------


def headline(run: RunFile) -> Table:
    """One row a workload and variant."""
    header = ("workload, variant", "requests", "TPOT ms, mean [95 %]", "median", "p99", "tok/s without prefill",
              "tok/s with prefill", "TTFT ms, median", "acceptance length", "of the limit", "speed-up [95 %]")  # fmt: skip
    rows = []
    for s in run.summaries:
        tpot, ttft = s.distributions.get("tpot_ms"), s.distributions.get("ttft_ms")
        failed = f" ({s.failed} failed)" if s.failed else ""
        rows.append((
            f"{s.workload}, {called(run, s.variant)}", f"{s.requests}{failed}", interval(tpot),
            number(tpot.median if tpot else None), number(tpot.p99 if tpot else None),
            interval(s.ratios.get("total_decode_tok_s")), interval(s.ratios.get("total_tok_s")),
            number(ttft.median if ttft else None),
            interval(s.ratios.get("acceptance_length")), share(s.share_of_limit), _speedup(run, s),
        ))  # fmt: skip
    note = (
        "tok/s and acceptance length are ratios of sums over requests, TPOT is the mean of each request's ratio. "
        "Intervals are bootstraps over requests. Of the limit: the time that the bytes of all rounds take at the measured "
        "read rate, over the time of decoding; plain rounds from shapes, others as counted in one round of each width, "
        "with the experts that it chose."
    )
    return Table("Headline", header, tuple(rows), note)


def _speedup(run: RunFile, s: Summary) -> str:
    verdict = next((v for v in run.verdicts if (v.variant, v.workload) == (s.variant, s.workload)), None)
    if verdict is None:
        return "baseline" if run.card.variants and s.variant == run.card.variants[0].name else "-"
    if verdict.speedup is None:
        return verdict.conclusion
    between = "" if verdict.low is None else f" [{verdict.low:.2f}, {verdict.high:.2f}]"
    return f"{verdict.speedup:.2f}x{between}"


def checks(run: RunFile) -> Table:
    said = {True: "passed", False: "FAILED", None: "not asked"}
    rows = tuple((c.name, c.workload, c.variant, said[c.passed], c.detail) for c in run.checks)
    return Table("Correctness in the same run", ("check", "workload", "variant", "", "detail"), rows, numeric=False)


def distributions(run: RunFile, workload: str) -> Table:
    header = ("metric", "variant", "mean", "95 % low", "95 % high", "median", "p90", "p99", "min", "max", "n")
    rows = []
    for name, metric in METRICS.items():
        for s in run.summaries:
            found = s.distributions.get(name)
            if s.workload == workload and found is not None:
                parts = (found.mean, found.low, found.high, found.median, found.p90, found.p99, found.min, found.max)
                rows.append((f"{name}, {metric.unit}", called(run, s.variant), *map(number, parts), str(found.n)))
    return Table(f"Distributions: {workload}", header, tuple(rows))


def card_table(run: RunFile) -> Table:
    card = run.card
    rows = [(name, value) for name, value in _flat(card) if not name.startswith(("workloads", "variants"))]
    for kind, items in (("workload", card.workloads), ("variant", card.variants)):
        rows += [(f"{kind} {item.name}", ", ".join(f"{n} {v}" for n, v in _flat(item) if n != "name")) for item in items]
    rows += [("command", run.command), ("soloist", run.soloist), ("schema version", str(run.schema_version))]
    return Table(f"Card {run.card_hash}", ("", ""), tuple(rows), numeric=False)


def machine_table(run: RunFile) -> Table:
    """What is not known stands there with the reason."""
    why, rows = run.machine.unknown, []
    for name, value in _flat(replace(run.machine, unknown={})):
        reason = why.get(name.removeprefix("versions."))
        rows.append((name, value if reason is None else f"none: {reason}"))
    return Table("Machine", ("", ""), tuple(rows), numeric=False)


def conditions_table(run: RunFile) -> Table:
    """How far everything moved that may move while a run lasts."""
    def unknown(name: str) -> str:
        return f"unknown: {run.machine.unknown[name]}" if name in run.machine.unknown else "unknown"

    def span(of: Callable[[Condition], Iterable[float]], name: str = "driver") -> str:
        values = [value for c in run.conditions for value in of(c)]
        return f"{number(min(values))} to {number(max(values))}" if values else unknown(name)

    reasons = ", ".join(sorted({reason for c in run.conditions for reason in c.throttle})) or "none"
    rows = (
        ("GPU clock, MHz", span(lambda c: c.clock_mhz)),
        ("GPU memory clock, MHz", span(lambda c: c.memory_clock_mhz)),
        ("GPU temperature, C", span(lambda c: c.temperature_c)),
        ("GPU power, W", span(lambda c: c.power_w)),
        ("GPU throttle reasons", reasons if any(c.clock_mhz for c in run.conditions) else unknown("driver")),
        ("CPU clock, MHz", span(lambda c: c.cpu_clock_mhz, "cpu_clock_mhz")),
        ("CPU held down by heat, times", span(lambda c: _one(c.cpu_throttled), "cpu_throttled")),
        ("CPU energy", unknown("cpu_energy") if "cpu_energy" in run.machine.unknown else "see energy_j_per_token"),
        ("load average", span(lambda c: _one(c.load), "load")),
        ("cores that others took", span(lambda c: _one(c.other_cores), "load")),
        ("other busy processes", ", ".join(sorted({name for c in run.conditions for name in c.busy})) or "none"),
        ("memory read rate, GB/s", "unknown" if run.read_rate is None else number(run.read_rate / 1e9)),
    )
    return Table(f"Conditions, {len(run.conditions)} readings", ("", "from, to"), rows, numeric=False)


def _one(value: float | None) -> tuple[float, ...]:
    return () if value is None else (value,)


def plan_tables(run: RunFile) -> list[Table]:
    plans = [Table(f"Plan of {name}", ("", ""), tuple((k, str(v)) for k, v in plan.items()), numeric=False)
             for name, plan in run.plans.items()]  # fmt: skip
    ops = [Table(f"Ops on {device}", ("op", "implementation"), tuple(table.items()), numeric=False)
           for device, table in run.ops.items()]  # fmt: skip
    return plans + ops


def transfer_table(transfer: Transfer, axis: str) -> Table:
    def row(group: Group) -> tuple[str, ...]:
        p99 = group.tpot_ms.p99 if group.tpot_ms else None
        return group.value, str(group.requests), interval(group.tpot_ms), number(p99), interval(group.acceptance_length)

    header = (axis, "requests", "TPOT ms, mean [95 %]", "p99", "acceptance length [95 %]")
    return Table(f"By {axis}", header, tuple(map(row, transfer.axes[axis])))


def transfer_sentence(transfer: Transfer) -> str:
    """The range that a capacity plan may use, and what is not known."""
    subject = f"{transfer.subject.variant} with {transfer.subject.model} on {transfer.subject.machine}"
    if transfer.refused:
        return f"{subject}: no range, because {transfer.refused}."
    if transfer.tpot_ms is None:
        return f"{subject}: no range, because no request has a TPOT."
    told = f"{subject}: plan with a TPOT from {' to '.join(map(number, transfer.tpot_ms))} ms"
    if transfer.acceptance_length is not None:
        told += f" and an acceptance length from {' to '.join(map(number, transfer.acceptance_length))}"
    unknown = [f"{axis} (preset {PRESETS[axis]} does)" for axis in transfer.not_varied]
    rest = f" Nothing is known of other values of what was not varied: {', '.join(unknown)}." if unknown else ""
    return f"{told}, not with one number.{rest}"


def varied_axes(transfer: Transfer) -> list[str]:
    return [axis for axis in AXES if axis not in transfer.not_varied]


# ---- charts ----------------------------------------------------------------------------------------------------------


def _series(run: RunFile, variant: str, points: tuple[Point, ...], style: str) -> Series:
    return Series(called(run, variant), points, style, [v.name for v in run.card.variants].index(variant))


def tpot_chart(run: RunFile, workload: str) -> Chart:
    """Share of requests at or below a TPOT."""
    series = []
    for variant in _variants(run):
        times = sorted(ms for ms in map(tpot_ms, _good(run, variant, workload)) if ms is not None)
        points = tuple((ms, (i + 1) / len(times)) for i, ms in enumerate(times))
        if points:
            series.append(_series(run, variant, ((points[0][0], 0.0), *points), "steps"))
    return Chart(f"{workload}: TPOT of requests", "TPOT, ms", "share of requests at or below", tuple(series), y_max=1.0)


def rounds_chart(run: RunFile, workload: str) -> Chart:
    """How many tokens a round emitted; a variant whose rounds all give one token shows nothing."""
    series = []
    for s in _summaries(run, workload):
        total = sum(s.rounds_by_tokens)
        if total and len(s.rounds_by_tokens) > 2:
            points = tuple((float(k), count / total) for k, count in enumerate(s.rounds_by_tokens) if k)
            series.append(_series(run, s.variant, points, "bars"))
    return Chart(f"{workload}: tokens of a round", "tokens emitted", "share of rounds", tuple(series))


def places_chart(run: RunFile, workload: str) -> Chart:
    """Of drafts at a place whose predecessors were right, the share that was right."""
    series = []
    for s in _summaries(run, workload):
        pairs = zip(s.accepted_at, s.tried_at, strict=True)
        points = tuple((float(place), yes / tried) for place, (yes, tried) in enumerate(pairs, 1) if tried)
        if points:
            series.append(_series(run, s.variant, points, "line"))
    return Chart(f"{workload}: acceptance by place", "place in the draft", "accepted, if all before were",
                 tuple(series), y_max=1.0)  # fmt: skip


def context_chart(run: RunFile) -> Chart:
    """Every request's TPOT at the middle of its decoding."""
    series = []
    for variant in _variants(run):
        points = []
        for record in run.requests:
            ms = tpot_ms(record)
            if record.variant == variant and record.error is None and ms and record.prompt_tokens and record.output_tokens:
                points.append((record.prompt_tokens + record.output_tokens / 2, ms))
        if points:
            series.append(_series(run, variant, tuple(sorted(points)), "dots"))
    return Chart("TPOT against context", "tokens in the context, middle of decoding", "TPOT, ms", tuple(series), log_x=True)


def time_line(run: RunFile) -> TimeLine:
    """The first request of every variant on the first workload whose blocks are at hand."""
    for workload in run.card.workloads:
        strips = []
        for variant in _variants(run):
            record = next((r for r in _good(run, variant, workload.name) if r.blocks and r.prompt == 0), None)
            if record is not None:
                strips.append(_strip(called(run, variant), record))
        if strips:
            return TimeLine(f"{workload.name}: one request", tuple(strips), "a bar is a block; darker holds more tokens")
    return TimeLine("", ())


def _strip(name: str, record: RequestRecord) -> Strip:
    times = [block.t_ms for block in record.blocks]
    pairs = zip(times, record.blocks[1:], strict=False)
    return Strip(name, times[0], tuple((begin, block.t_ms, block.n) for begin, block in pairs))


def _variants(run: RunFile) -> list[str]:
    return [variant.name for variant in run.card.variants]


def _good(run: RunFile, variant: str, workload: str) -> Iterable[RequestRecord]:
    return (record for record in run.of(variant, workload) if record.error is None)


def _summaries(run: RunFile, workload: str) -> list[Summary]:
    return [s for s in run.summaries if s.workload == workload]


# ---- words -----------------------------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """Three digits or so; `-` for what is not known."""
    if value is None:
        return "-"
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3g}"


def interval(found: Distribution | Ratio | None) -> str:
    if found is None:
        return "-"
    return number(found.centre) + ("" if found.low is None else f" [{number(found.low)}, {number(found.high)}]")


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _flat(record: Any) -> list[tuple[str, str]]:
    """The fields of a dataclass as texts, nested dictionaries as `name.key`."""
    assert is_dataclass(record)
    found = []
    for each in fields(record):
        value = getattr(record, each.name)
        if isinstance(value, dict):
            found += [(f"{each.name}.{key}", "none" if item is None else str(item)) for key, item in value.items()]
        elif isinstance(value, tuple):
            found.append((each.name, ", ".join(map(str, value)) or "none"))
        else:
            found.append((each.name, "-" if value is None else str(value)))
    return found
