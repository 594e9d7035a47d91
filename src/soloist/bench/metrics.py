"""Every metric, with its definition. The table of docs/measurement.md is rendered from here, and a test compares them.

Letters of the definitions: t_0 the request was sent, t_first the first token ids were known and n_first how many they
were, t_last the last ones, t_end the end of the answer, N all output tokens as the target counted them. Blocks are
moments at which tokens became known: two events in one packet are one block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from soloist.bench.records import RequestRecord

Pair = tuple[float, float]


@dataclass(frozen=True)
class RequestMetric:
    """One number a request. better: which way is good; empty where neither is."""

    name: str
    unit: str
    better: Literal["less", "more", ""]
    definition: str
    of: Callable[[RequestRecord], float | None]


@dataclass(frozen=True)
class BlockMetric:
    """One number a block or round after the first; the blocks of all requests are pooled."""

    name: str
    unit: str
    better: Literal["less", "more", ""]
    definition: str
    of: Callable[[RequestRecord], list[float]]


@dataclass(frozen=True)
class RatioMetric:
    """A ratio of two sums over requests."""

    name: str
    unit: str
    better: Literal["less", "more", ""]
    definition: str
    of: Callable[[RequestRecord], Pair | None]


def decode_tokens(r: RequestRecord) -> int | None:
    """N - n_first, None if either is unknown."""
    if r.output_tokens is None or r.first_tokens is None:
        return None
    return r.output_tokens - r.first_tokens


def decode_ms(r: RequestRecord) -> float | None:
    return None if r.ttft_ms is None or r.last_ms is None else r.last_ms - r.ttft_ms


def tpot_ms(r: RequestRecord) -> float | None:
    tokens, ms = decode_tokens(r), decode_ms(r)
    return ms / tokens if tokens and tokens > 0 and ms is not None else None


def server_tpot_ms(r: RequestRecord) -> float | None:
    """As `tpot_ms`, between the same two blocks."""
    tokens, clocks = decode_tokens(r), [block.server_ms for block in r.blocks]
    if not tokens or tokens < 0 or len(clocks) < 2 or clocks[0] is None or clocks[-1] is None:
        return None
    return (clocks[-1] - clocks[0]) / tokens


def _per_second(tokens: float | None, ms: float | None) -> float | None:
    return None if tokens is None or not ms else tokens * 1e3 / ms


def _decode_rate(r: RequestRecord) -> float | None:
    ms = tpot_ms(r)
    return 1e3 / ms if ms else None


def _acceptance(r: RequestRecord) -> Pair | None:
    tokens = decode_tokens(r)
    return None if tokens is None or not r.rounds else (float(tokens), float(r.rounds))


def _prefilled(r: RequestRecord) -> float | None:
    return None if r.prompt_tokens is None else float(r.prompt_tokens - (r.cached_tokens or 0))


def moments(r: RequestRecord) -> list[tuple[float, int | None]]:
    """Blocks by moment: (t_ms, tokens that became known then, None where one of them is not told)."""
    found = []
    for t_ms, blocks in groupby(r.blocks, lambda block: block.t_ms):
        counts = [block.n for block in blocks]
        found.append((t_ms, None if None in counts else sum(n for n in counts if n is not None)))
    return found


def _gaps(r: RequestRecord) -> list[tuple[float, int | None]]:
    """(time since the block before, tokens) of every block after the first."""
    seen = moments(r)
    return [(now - before, n) for (before, _), (now, n) in zip(seen, seen[1:], strict=False)]


def _round_times(r: RequestRecord) -> list[tuple[float, float]]:
    """(time since the round before, round_ms) of every block after the first whose own time is told."""
    pairs = zip(r.blocks, r.blocks[1:], strict=False)
    return [(now.t_ms - before.t_ms, now.round_ms) for before, now in pairs if now.round_ms is not None]


def _ratio(top: float | None, bottom: float | None, scale: float = 1.0) -> Pair | None:
    return None if top is None or not bottom else (top * scale, bottom)


def _mean(pair: Pair | None) -> float | None:
    return None if pair is None else pair[0] / pair[1]


REQUEST_METRICS = (
    RequestMetric("ttft_ms", "ms", "less", "t_first - t_0: the first token id is known", lambda r: r.ttft_ms),
    RequestMetric("first_text_ms", "ms", "less", "first visible text - t_0, reasoning included", lambda r: r.first_text_ms),
    RequestMetric("first_answer_ms", "ms", "less", "first text that is no reasoning - t_0", lambda r: r.first_answer_ms),
    RequestMetric("tpot_ms", "ms", "less", "decode TPOT: (t_last - t_first) / (N - n_first)", tpot_ms),
    RequestMetric(
        "server_tpot_ms", "ms", "less", "TPOT by the server's own clock; what tpot_ms is above it, serving costs",
        server_tpot_ms,
    ),
    RequestMetric("e2e_ms", "ms", "less", "end to end: t_end - t_0", lambda r: r.end_ms),
    RequestMetric(
        "request_decode_tok_s", "tok/s", "more", "without prefill: (N - n_first) / (t_last - t_first) of each request",
        _decode_rate,
    ),
    RequestMetric(
        "request_tok_s", "tok/s", "more", "with prefill: N / (t_end - t_0) of each request",
        lambda r: _per_second(r.output_tokens, r.end_ms),
    ),
    RequestMetric(
        "prefill_tok_s", "tok/s", "more", "(prompt tokens - cached ones) / (t_first - t_0)",
        lambda r: _per_second(_prefilled(r), r.ttft_ms),
    ),
    RequestMetric(
        "request_acceptance_length", "tokens", "more", "(N - n_first) / rounds of each request, cut at its end",
        lambda r: _mean(_acceptance(r)),
    ),
    RequestMetric("output_tokens", "tokens", "", "N", lambda r: r.output_tokens),
    RequestMetric(
        "regret", "nats", "less",
        "largest gap between the likeliest token's log probability and the emitted token's, by our own teacher-forced logits",
        lambda r: r.regret,
    ),
)  # fmt: skip

BLOCK_METRICS = (
    BlockMetric(
        "block_gap_ms", "ms", "less", "time from one block to the next: what the eye sees",
        lambda r: [gap for gap, _ in _gaps(r)],
    ),
    BlockMetric(
        "tokens_per_block", "tokens", "more", "tokens of a block after the first",
        lambda r: [float(n) for _, n in _gaps(r) if n],
    ),
    BlockMetric(
        "token_time_ms", "ms", "less", "block gap / tokens of the block, once a block",
        lambda r: [gap / n for gap, n in _gaps(r) if n],
    ),
    BlockMetric(
        "round_ms", "ms", "less", "the engine's own time for a round: from its launch to its tokens on the host",
        lambda r: [ms for _, ms in _round_times(r)],
    ),
    BlockMetric(
        "host_gap_ms", "ms", "less", "time from one round's end to the next one's, minus round_ms: what the host adds",
        lambda r: [gap - ms for gap, ms in _round_times(r)],
    ),
)  # fmt: skip

RATIO_METRICS = (
    RatioMetric(
        "total_tok_s", "tok/s", "more", "with prefill: sum of N / sum of (t_end - t_0)",
        lambda r: _ratio(r.output_tokens, r.end_ms, 1e3),
    ),
    RatioMetric(
        "total_decode_tok_s", "tok/s", "more", "without prefill: sum of (N - n_first) / sum of (t_last - t_first)",
        lambda r: _ratio(decode_tokens(r), decode_ms(r), 1e3),
    ),
    RatioMetric(
        "acceptance_length", "tokens", "more", "sum of (N - n_first) / sum of rounds; the model's own token counts",
        _acceptance,
    ),
    RatioMetric(
        "accepted_share", "", "more", "sum of accepted drafts / sum of drafts that were verified",
        lambda r: _ratio(r.accepted, r.drafted),
    ),
    RatioMetric("drafted_per_round", "tokens", "", "sum of drafts that were verified / sum of rounds",
                lambda r: _ratio(r.drafted, r.rounds)),
    RatioMetric(
        "total_prefill_tok_s", "tok/s", "more", "sum of (prompt tokens - cached ones) / sum of (t_first - t_0)",
        lambda r: _ratio(_prefilled(r), r.ttft_ms, 1e3),
    ),
    RatioMetric(
        "energy_j_per_token", "J", "less", "sum of energy from t_0 to t_end, of the GPUs or of the CPU that computes / sum of N",
        lambda r: _ratio(r.energy_j, r.output_tokens),
    ),
)  # fmt: skip

METRICS = {m.name: m for m in (*REQUEST_METRICS, *BLOCK_METRICS, *RATIO_METRICS)}


def acceptance_places(r: RequestRecord) -> list[tuple[int, int]]:
    """(accepted, tried) at every place of the draft. A draft is tried if its predecessors were accepted.

    The last round may have been cut by the end of the request, which hides whether the next draft would have been wrong.
    """
    found: list[list[int]] = []
    for i, block in enumerate(r.blocks[1:], 2):
        if block.drafted is None or block.accepted is None:
            continue
        tried = min(block.accepted + (i < len(r.blocks)), block.drafted)
        found += [[0, 0] for _ in range(tried - len(found))]
        for place in range(tried):
            found[place][0] += place < block.accepted
            found[place][1] += 1
    return [(accepted, tried) for accepted, tried in found]


def definitions_table() -> str:
    """The metrics as a Markdown table, for docs/measurement.md."""
    kinds = {RequestMetric: "a request", BlockMetric: "a block", RatioMetric: "ratio of sums"}
    rows = [f"| `{m.name}` | {m.unit} | {kinds[type(m)]} | {m.definition} |" for m in METRICS.values()]
    return "\n".join(["| metric | unit | one number for | definition |", "|---|---|---|---|", *rows])
