"""Numbers about numbers, with numpy alone: distributions, ratios of sums, intervals, a paired test, a trend.

Intervals are 95 % percentile bootstraps over requests: blocks of one request stand or fall together, because they are
alike. The random stream is fixed, so the same samples give the same interval.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soloist.bench.records import Distribution, Ratio

RESAMPLES = 2000
MIN_PAIRS = 6
"""Fewer pairs cannot reach p < 0.05 in a two-sided sign-flip test: 2 / 2**5 is above it."""

Array = np.ndarray


def distribution(samples: Sequence[Sequence[float]]) -> Distribution | None:
    """Of all samples, grouped by request; None without any. Percentiles are interpolated linearly."""
    groups = [np.asarray(group, dtype=np.float64) for group in samples if len(group)]
    if not groups:
        return None
    values = np.concatenate(groups)
    sums, counts = np.array([group.sum() for group in groups]), np.array([len(group) for group in groups])
    low, high = _interval(_resampled(sums, counts)) if len(groups) > 1 else (None, None)
    median, p90, p99 = np.percentile(values, [50, 90, 99])
    return Distribution(
        mean=float(values.mean()), median=float(median), p90=float(p90), p99=float(p99),
        min=float(values.min()), max=float(values.max()), n=len(values), low=low, high=high,
    )  # fmt: skip


def ratio(pairs: Sequence[tuple[float, float]]) -> Ratio | None:
    """Sum of the first over sum of the second; None without pairs."""
    if not pairs:
        return None
    tops, bottoms = np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs])
    low, high = _interval(_resampled(tops, bottoms)) if len(pairs) > 1 else (None, None)
    return Ratio(float(tops.sum() / bottoms.sum()), float(tops.sum()), float(bottoms.sum()), low, high)


def mean_interval(values: Array) -> tuple[float, float]:
    """95 % interval of the mean of [n] values."""
    return _interval(_resampled(values, np.ones(len(values))))


def sign_flip_p(values: Array) -> float:
    """Two-sided p of a mean this far from 0 if every value [n] might as well have had the other sign.

    All sign patterns where there are at most 2**12, otherwise 10,000 drawn ones.
    """
    n = len(values)
    if n <= 12:
        signs = 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
    else:
        signs = _stream().choice((-1, 1), size=(10_000, n))
    means = np.abs(signs @ values) / n
    extreme = int((means >= abs(values.mean()) * (1 - 1e-12)).sum())
    return extreme / len(signs) if n <= 12 else (extreme + 1) / (len(signs) + 1)


def trend_percent(times: Sequence[float], values: Sequence[float]) -> tuple[float, float, float] | None:
    """Change of the values from the first time to the last along a fitted line, in percent of the line's start.

    Returns: the change and its 95 % interval; None for fewer than MIN_PAIRS values.
    """
    t, v = np.asarray(times, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if len(v) < MIN_PAIRS or np.ptp(t) == 0:
        return None
    picks = _stream().integers(0, len(v), size=(RESAMPLES, len(v)))
    picks = picks[np.ptp(t[picks], axis=1) > 0]
    low, high = _interval(_line_change(t[picks], v[picks], t))
    return float(_line_change(t[None], v[None], t)[0]), low, high


def _line_change(t: Array, v: Array, span: Array) -> Array:
    """Percent along the fitted line of every row of t, v [B, n], between the ends of `span`."""
    centre, level = t.mean(1, keepdims=True), v.mean(1, keepdims=True)
    slope = ((t - centre) * (v - level)).sum(1) / ((t - centre) ** 2).sum(1)
    start = level[:, 0] + slope * (span.min() - centre[:, 0])
    return 100 * slope * np.ptp(span) / start


def _resampled(tops: Array, bottoms: Array) -> Array:
    """Ratio of sums in every bootstrap resample: [RESAMPLES]."""
    picks = _stream().integers(0, len(tops), size=(RESAMPLES, len(tops)))
    return tops[picks].sum(1) / bottoms[picks].sum(1)


def _interval(estimates: Array) -> tuple[float, float]:
    low, high = np.percentile(estimates, [2.5, 97.5])
    return float(low), float(high)


def _stream() -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(20260821))
