"""From the records of a run to its summaries and verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from soloist.bench.metrics import BLOCK_METRICS, METRICS, RATIO_METRICS, REQUEST_METRICS, acceptance_places, decode_ms, tpot_ms
from soloist.bench.records import Card, RequestRecord, RoundBytes, Summary, Variant, Verdict
from soloist.bench.stats import MIN_PAIRS, distribution, mean_interval, ratio, sign_flip_p, trend_percent

ALPHA = 0.05
HEADLINE = "tpot_ms"
MANY = 20
"""Prompts of which each ran once, from which their differences average out of a trend."""

Moved = Mapping[tuple[str, str], tuple[RoundBytes, ...]]
"""(variant, workload) -> what its rounds move, see `limit.py`."""


def summarise_run(
    card: Card, requests: Sequence[RequestRecord], moved: Moved | None = None, read_rate: float | None = None
) -> tuple[Summary, ...]:
    """One summary for every workload and variant that ran. read_rate: bytes a second."""
    found = []
    for workload in card.workloads:
        for variant in card.variants:
            own = [r for r in requests if (r.workload, r.variant) == (workload.name, variant.name)]
            if own:
                found.append(summarise(own, variant, (moved or {}).get((variant.name, workload.name), ()), read_rate))
    return tuple(found)


def summarise(
    requests: Sequence[RequestRecord],
    variant: Variant,
    round_bytes: tuple[RoundBytes, ...] = (),
    read_rate: float | None = None,
) -> Summary:
    """Of the requests of one variant on one workload; failed ones are counted and left out."""
    good = [r for r in requests if r.error is None]
    samples = {m.name: [[v] for r in good if (v := m.of(r)) is not None] for m in REQUEST_METRICS}
    samples |= {m.name: [m.of(r) for r in good] for m in BLOCK_METRICS}
    distributions = {name: found for name, groups in samples.items() if (found := distribution(groups)) is not None}
    pairs = {m.name: [pair for r in good if (pair := m.of(r)) is not None] for m in RATIO_METRICS}
    accepted, tried = _places(good)
    return Summary(
        variant=requests[0].variant,
        workload=requests[0].workload,
        requests=len(requests),
        failed=len(requests) - len(good),
        distributions=distributions,
        ratios={name: quotient for name, each in pairs.items() if (quotient := ratio(each)) is not None},
        rounds_by_tokens=_rounds_by_tokens(good),
        accepted_at=accepted,
        tried_at=tried,
        drift_percent=_drift(good),
        share_of_limit=None if read_rate is None else _share(good, round_bytes, read_rate),
        synthetic=variant.synthetic,
        round_bytes=round_bytes,
    )


def _drift(requests: Sequence[RequestRecord]) -> tuple[float, float, float] | None:
    """Of TPOT, each divided by the mean of its prompt, which may be an easy or a hard one; so prompts must repeat, or be
    MANY.
    """
    timed = [(r, ms) for r in requests if (ms := tpot_ms(r)) is not None]
    by_prompt: dict[int, list[float]] = {}
    for r, ms in timed:
        by_prompt.setdefault(r.prompt, []).append(ms)
    repeated = all(len(each) > 1 for each in by_prompt.values())
    if not repeated and len(by_prompt) < MANY:
        return None
    scale = {prompt: float(np.mean(each)) if repeated else 1.0 for prompt, each in by_prompt.items()}
    return trend_percent([r.at_s for r, _ in timed], [ms / scale[r.prompt] for r, ms in timed])


def _share(requests: Iterable[RequestRecord], round_bytes: Sequence[RoundBytes], read_rate: float) -> float | None:
    """Mean over the requests whose every round is of a known width; each round at its own context."""
    known, shares = {each.width: each for each in round_bytes}, []
    for r in requests:
        ms, context, total, blocks = decode_ms(r), r.prompt_tokens, 0, r.blocks[1:]
        if not ms or context is None or not all(block.drafted in known for block in blocks):
            continue
        for before, block in zip(r.blocks, blocks, strict=False):
            context += before.n or 0
            each = known[block.drafted]  # type: ignore[index]
            total += each.fixed_bytes + each.position_bytes * context
        shares.append(total / read_rate * 1e3 / ms)
    return sum(shares) / len(shares) if shares else None


def _places(requests: Iterable[RequestRecord]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    accepted, tried = list[int](), list[int]()
    for request in requests:
        for place, (yes, all_) in enumerate(acceptance_places(request)):
            if place == len(tried):
                accepted.append(0)
                tried.append(0)
            accepted[place] += yes
            tried[place] += all_
    return tuple(accepted), tuple(tried)


def _rounds_by_tokens(requests: Iterable[RequestRecord]) -> tuple[int, ...]:
    counts = [block.n for r in requests for block in r.blocks[1:] if block.drafted is not None and block.n is not None]
    return tuple(np.bincount(counts).tolist()) if counts else ()


def verdicts_of(card: Card, requests: Sequence[RequestRecord]) -> tuple[Verdict, ...]:
    """Every variant beside the card's first one, on every workload."""
    baseline, *others = card.variants
    found = []
    for workload in card.workloads:
        own = [r for r in requests if r.workload == workload.name]
        for other in others:
            first, second = ([r for r in own if r.variant == name] for name in (baseline.name, other.name))
            if first and second:
                found.append(judge(first, second))
    return tuple(found)


def judge(
    baseline: Sequence[RequestRecord], variant: Sequence[RequestRecord], metric: str = HEADLINE, tolerance: float = 0.0
) -> Verdict:
    """Pair requests by prompt and repeat, and ask whether `metric` differs by more than the tolerance.

    Pairs of one prompt are alike, and so are pairs of one repeat, which ran at one time: with at least MIN_PAIRS prompts
    or repeats they count once, by their mean, and of the two ways to count the one with the wider interval holds.
    """
    names = (baseline[0].variant, variant[0].variant, variant[0].workload, metric)
    failed = [r for r in (*baseline, *variant) if r.text_same is False or r.error is not None]
    if failed:
        why = "a request failed" if any(r.error is not None for r in failed) else "the text differs"
        return Verdict(*names, 0, None, None, None, None, f"failed: {why} ({len(failed)} requests)")
    ways = _log_speedups(baseline, variant, metric)
    logs = ways[0]
    if len(logs) < MIN_PAIRS:
        speedup = float(np.exp(logs.mean())) if len(logs) else None
        return Verdict(*names, len(logs), speedup, None, None, None, f"too few pairs: {len(logs)} of {MIN_PAIRS}")
    low, high, logs = max(((*mean_interval(way), way) for way in ways), key=lambda found: found[1] - found[0])
    p = sign_flip_p(logs)
    bound = float(np.log1p(tolerance))
    conclusion = "no difference found"
    if p < ALPHA and low > bound:
        conclusion = "faster"
    elif p < ALPHA and high < -bound:
        conclusion = "slower"
    speedup, low, high = (float(np.exp(x)) for x in (logs.mean(), low, high))
    return Verdict(*names, len(logs), speedup, low, high, p, conclusion)


def _log_speedups(
    baseline: Sequence[RequestRecord], variant: Sequence[RequestRecord], metric: str
) -> list[np.ndarray]:
    """log(baseline / variant), above 0 where the variant is better: means by prompt and by repeat where there are enough
    of them, otherwise every pair.
    """
    found = METRICS[metric]
    sign = 1 if found.better == "less" else -1
    mine = {(r.prompt, r.repeat): found.of(r) for r in baseline}
    logs, by_prompt, by_repeat = list[float](), dict[int, list[float]](), dict[int, list[float]]()
    for r in variant:
        a, b = mine.get((r.prompt, r.repeat)), found.of(r)
        if isinstance(a, float | int) and isinstance(b, float | int) and a > 0 and b > 0:
            logs.append(sign * float(np.log(a / b)))
            by_prompt.setdefault(r.prompt, []).append(logs[-1])
            by_repeat.setdefault(r.repeat, []).append(logs[-1])
    grouped = [each for each in (by_prompt, by_repeat) if len(each) >= MIN_PAIRS]
    ways = [np.array([np.mean(group) for group in each.values()]) for each in grouped]
    return ways or [np.array(logs)]
