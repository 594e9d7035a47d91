"""What makes a run mean less than its numbers say. Every flag is found from the records, and stands in the file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soloist.bench.metrics import tpot_ms
from soloist.bench.prompts import orderliness
from soloist.bench.records import Card, Condition, Flag, Machine, RequestRecord, Summary
from soloist.bench.target import Prompt

FLAGS = {
    "partial": "the run was ended before its time",
    "text differs": "a variant wrote another text than plain decoding: it has no speed-up",
    "failed requests": "requests ended with an error, and are left out of every number",
    "synthetic acceptance": "a variant's acceptance was pinned: it says nothing of any drafter",
    "one rank alone": "one of several ranks ran, without the others and without communication; its text means nothing",
    "random weights": "times hold for the shapes; text and acceptance mean nothing",
    "cold": "no warm-up, or the first request of a variant was slower than the others",
    "compiled": "kernels were compiled, or loaded for the first time, during measured requests",
    "prefix hit": "prompt tokens came from a prefix cache though the card says cold",
    "clocks changed": "a GPU's clock moved by more than 3 % between or during requests",
    "throttled": "the driver, or heat, held a clock down",
    "clocks unknown": "nvidia-smi told nothing: whether clocks changed or were held down is not known",
    "busy machine": "other processes took part of a core",
    "governor": "the CPU's clock is not fixed at its best",
    "drift": "TPOT changed over the run by more than 5 %",
    "scatter": "TPOT of one prompt, repeated, varies by more than 10 %",
    "no count": "the server did not count its tokens: no rate and no TPOT is given",
    "ended early": "an answer is shorter than the card asks for though it ignores the end of text",
    "repetitive prompts": "prompts repeat themselves more than real text: acceptance is that of this workload alone",
    "random prompts": "prompts are no text: acceptance is that of this workload alone",
    "uncommitted changes": "the code that ran is in no commit",
}

OF_PROMPTS = ("repetitive prompts", "random prompts")
"""Found before a request is sent, see `prompt_flags`; the others follow from a run's records."""

COLD, DRIFT, SCATTER, CLOCK, BUSY = 1.5, 5.0, 0.10, 0.03, 0.15
TILED, RANDOM = 0.4, 0.985
"""`prompts.orderliness` below and above which prompts are unlike text."""
LONG = 512
"""Tokens from which it says something."""


def find_flags(
    card: Card,
    machine: Machine,
    conditions: Sequence[Condition],
    requests: Sequence[RequestRecord],
    summaries: Sequence[Summary],
    partial: bool,
    on_gpu: bool,
) -> list[Flag]:
    """All of them but those of the prompts."""
    found = [Flag("partial", f"{len(requests)} requests were measured", len(requests))] if partial else []
    found += _of_card(card)
    found += _of_machine(machine, conditions, on_gpu)
    found += _of_requests(card, requests)
    for summary in summaries:
        where = f"{summary.variant} on {summary.workload}"
        if summary.drift_percent is not None:
            change, low, high = summary.drift_percent
            if abs(change) > DRIFT and (low > 0 or high < 0):
                found.append(Flag("drift", f"{where}: TPOT {change:+.1f} % from start to end [{low:+.1f}, {high:+.1f}]"))
    return found


def prompt_flags(workload: str, prompts: Sequence[Prompt]) -> list[Flag]:
    """Whether long prompts look like text."""
    shares = [share for p in prompts if len(p.token_ids or ()) >= LONG and (share := orderliness(p)) is not None]
    if not shares:
        return []
    typical = float(np.median(shares))
    detail = f"{workload}: ids compress to {typical:.0%} of the same ids shuffled, text to 69 % - 97 %"
    kind = "repetitive prompts" if typical < TILED else "random prompts" if typical > RANDOM else None
    return [] if kind is None else [Flag(kind, detail, len(shares))]


def _of_card(card: Card) -> list[Flag]:
    found = []
    pinned = [v for v in card.variants if v.synthetic]
    if pinned:
        named = ", ".join(f"{v.name} at {v.accept_length:g}" for v in pinned)
        found.append(Flag("synthetic acceptance", named))
    if card.random_weights:
        found.append(Flag("random weights", card.model))
    settings = [card.settings, *(v.settings for v in card.variants)]
    sizes = sorted({each["tp_rank_of"] for each in settings if each.get("tp_rank_of")})
    if sizes:
        found.append(Flag("one rank alone", f"rank 0 of {', '.join(map(str, sizes))}"))
    if card.warm_up == 0:
        found.append(Flag("cold", "the card asks for no warm-up"))
    return found


def _of_machine(machine: Machine, conditions: Sequence[Condition], on_gpu: bool) -> list[Flag]:
    found = []
    if machine.dirty:
        found.append(Flag("uncommitted changes", f"on top of {(machine.commit or '')[:12]}"))
    if not on_gpu and machine.governor not in (None, "performance"):
        found.append(Flag("governor", f"{machine.governor}; sudo cpupower frequency-set -g performance"))
    reasons = sorted({reason for c in conditions for reason in c.throttle})
    hot = [c.cpu_throttled for c in conditions if c.cpu_throttled is not None]
    if hot and not on_gpu and hot[-1] > hot[0]:
        reasons.append(f"heat held a CPU down {hot[-1] - hot[0]} times")
    if reasons:
        found.append(Flag("throttled", ", ".join(reasons)))
    named = {name.rpartition(" (")[0]: name for c in conditions for name in sorted(c.busy)}  # once, however often it was seen
    busy = sorted(named.values())
    others = max((c.other_cores or 0.0 for c in conditions[1:]), default=0.0)
    if others > BUSY:
        busy = [f"other programs, or the host, took {others:.1f} cores while measuring", *busy]
    if busy:
        found.append(Flag("busy machine", "; ".join(busy[:6])))
    clocks = [clock for c in conditions[1:-1] for clock in c.clock_mhz]  # between requests; before and after it may idle
    if on_gpu and conditions and not any(c.clock_mhz for c in conditions):
        found.append(Flag("clocks unknown", "clocks, power and reasons to throttle were not told"))
    if clocks and min(clocks) < max(clocks) * (1 - CLOCK):
        found.append(Flag("clocks changed", f"{min(clocks):.0f} to {max(clocks):.0f} MHz"))
    return found


def _of_requests(card: Card, requests: Sequence[RequestRecord]) -> list[Flag]:
    workloads = {w.name: w for w in card.workloads}
    cold = {w.name for w in card.workloads if w.cache == "cold"}
    kinds = {
        "failed requests": [r for r in requests if r.error is not None],
        "text differs": [r for r in requests if r.text_same is False],
        "compiled": [r for r in requests if r.compiled],
        "prefix hit": [r for r in requests if r.cached_tokens and r.workload in cold],
        "no count": [r for r in requests if r.error is None and (r.output_tokens is None or r.first_tokens is None)],
        "ended early": [
            r for r in requests
            if workloads[r.workload].ignore_eos and (r.output_tokens or 0) < workloads[r.workload].output_tokens
            and r.error is None and r.output_tokens is not None
        ],
    }  # fmt: skip
    found = []
    for kind, hit in kinds.items():
        if hit:
            where = sorted({f"{r.variant} on {r.workload}" for r in hit})
            why = f": {hit[0].error}" if hit[0].error else ""
            found.append(Flag(kind, "; ".join(where[:4]) + why, len(hit)))
    return found + _of_times(requests)


def _of_times(requests: Sequence[RequestRecord]) -> list[Flag]:
    """Slow first requests, and prompts whose repeats scatter."""
    found, groups = [], dict[tuple[str, str], list[RequestRecord]]()
    for r in requests:
        groups.setdefault((r.variant, r.workload), []).append(r)
    scattered = list[str]()
    for (variant, workload), own in groups.items():
        times = [ms for r in own if (ms := tpot_ms(r)) is not None]
        repeats = dict[int, list[float]]()
        for r in own:
            if (ms := tpot_ms(r)) is not None:
                repeats.setdefault(r.prompt, []).append(ms)
        spreads = [float(np.std(each, ddof=1) / np.mean(each)) for each in repeats.values() if len(each) >= 3]
        if spreads and float(np.median(spreads)) > SCATTER:
            scattered.append(f"{variant} on {workload} {np.median(spreads):.0%}")
        # Prompts differ in their acceptance, so a first request is measured by the repeats of its own prompt.
        first = repeats.get(own[0].prompt, [])
        if len(first) >= 3 and first[0] > COLD * float(np.median(first[1:])):
            found.append(Flag("cold", f"{variant} on {workload}: first request {first[0]:.2f} ms a token, then "
                              f"{np.median(first[1:]):.2f} ms", 1))  # fmt: skip
        ttft = [r.ttft_ms / r.prompt_tokens for r in own if r.ttft_ms is not None and r.prompt_tokens]
        if len(times) >= 3 and len(ttft) >= 3 and ttft[0] > 2 * COLD * max(ttft[1:]):
            found.append(Flag("cold", f"{variant} on {workload}: first prompt took {ttft[0] / max(ttft[1:]):.1f} times "
                              "as long a token as any other", 1))  # fmt: skip
    if scattered:
        found.append(Flag("scatter", "; ".join(scattered[:6])))
    return found


def flags_table() -> str:
    """The flags as a Markdown table, for docs/measurement.md."""
    return "\n".join(["| flag | meaning |", "|---|---|", *(f"| {kind} | {what} |" for kind, what in FLAGS.items())])
