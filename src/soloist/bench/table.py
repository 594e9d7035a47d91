"""A run or a comparison as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from soloist.bench.compare import Comparison
from soloist.bench.records import RunFile, Summary, Verdict

HEADINGS = ("variant", "tok/s", "ms per token", "", "of limit", "TTFT ms", "acceptance", "speed-up", "", "text")


def run_lines(run: RunFile) -> Iterator[str]:
    """Headline numbers of every workload, then what was found wrong. tok/s is without prefill, a ratio of sums; of limit: the
    time that the bytes of the rounds take, over the time of decoding.
    """
    state = " | PARTIAL" if run.partial else "" if run.passed else " | FAILED"
    yield f"{run.card.name}, card {run.card_hash}, {run.card.model}, {run.card.target}{state}"
    for workload in run.card.workloads:
        summaries = [s for s in run.summaries if s.workload == workload.name]
        if summaries:
            yield f"\n{workload.name}: {workload.prompts}, {summaries[0].requests} requests each, {_lengths(run, summaries)}"
            yield from _aligned([HEADINGS, *(_row(run, summary) for summary in summaries)])
    failed = [c for c in run.checks if c.passed is False]
    yield f"\nchecks: {sum(c.passed is True for c in run.checks)} passed, {len(failed)} failed"
    for check in failed:
        yield f"  FAILED {check.name}: {check.variant} on {check.workload}, {check.detail}"
    for flag in run.flags:
        yield f"  flag {flag.kind}: {flag.detail}"


def comparison_lines(found: Comparison) -> Iterator[str]:
    """B beside A."""
    subjects = [f"{name}: {a} -> {b}" for name, (a, b) in found.subjects.items()]
    yield f"subject: {'; '.join(subjects) or 'nothing differs, a repetition'}"
    rows = [("workload", "variant", "metric", "B against A", "", "pairs", "conclusion")]
    rows += [(v.workload, v.variant, v.metric, *_speedup(v), str(v.pairs), v.conclusion) for v in found.verdicts]
    yield from _aligned(rows)
    yield f"differences within {found.tolerance:.1%} do not count"
    if found.restless:
        yield f"NOT QUIET ({', '.join(found.restless)}): a difference may be the machine's; run both again"
    for mark, flag in found.flags:
        yield f"  flag of {mark}, {flag.kind}: {flag.detail}"


def _row(run: RunFile, s: Summary) -> tuple[str, ...]:
    tpot, ttft = s.distributions.get("tpot_ms"), s.distributions.get("ttft_ms")
    rate, length = s.ratios.get("total_decode_tok_s"), s.ratios.get("acceptance_length")
    verdict = next((v for v in run.verdicts if (v.workload, v.variant) == (s.workload, s.variant)), None)
    texts = [r.text_same for r in run.of(s.variant, s.workload) if r.text_same is not None]
    text = "unchecked" if not texts else "same" if all(texts) else "DIFFERS"
    return (
        s.variant + (" (synthetic)" if s.synthetic else "") + (f", {s.failed} failed" if s.failed else ""),
        "-" if rate is None else f"{rate.value:.1f}",
        "-" if tpot is None else f"{tpot.mean:.3g}",
        "" if tpot is None or tpot.low is None else f"[{tpot.low:.3g}, {tpot.high:.3g}]",
        "-" if s.share_of_limit is None else f"{s.share_of_limit:.0%}",
        "-" if ttft is None else f"{ttft.median:.3g}",
        "-" if length is None else f"{length.value:.2f}",
        *(("", "") if verdict is None else _speedup(verdict)),
        text,
    )


def _speedup(verdict: Verdict) -> tuple[str, str]:
    if verdict.speedup is None:
        return "none", ""
    interval = "" if verdict.low is None else f"[{verdict.low:.3g}, {verdict.high:.3g}]"
    return f"x{verdict.speedup:.3g}", interval


def _lengths(run: RunFile, summaries: Sequence[Summary]) -> str:
    """Of prompts and answers, the median where they differ."""
    own = list(run.of(summaries[0].variant, summaries[0].workload))
    prompts = [r.prompt_tokens for r in own if r.prompt_tokens is not None]
    outputs = [r.output_tokens for r in own if r.output_tokens is not None]
    return f"{_median(prompts)} tokens in, {_median(outputs)} out" if prompts and outputs else "lengths unknown"


def _median(counts: list[int]) -> str:
    return str(counts[0]) if len(set(counts)) == 1 else f"about {median(counts):.0f}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Columns beside each other, numbers to the right, names to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        yield "  " + "  ".join(cells).rstrip()
