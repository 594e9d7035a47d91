"""What follows from the requests of a run: summaries, verdicts, checks of the texts, flags, whether it passed."""

from __future__ import annotations

import dataclasses

from soloist.bench.flags import OF_PROMPTS, find_flags
from soloist.bench.records import RunFile
from soloist.bench.summarise import Moved, summarise_run, verdicts_of
from soloist.bench.texts import TEXT_CHECKS, text_checks


def conclude(run: RunFile, moved: Moved | None = None) -> RunFile:
    """The run with all that anew. Checks that had requests of their own, and flags of the prompts, are kept.

    moved: what rounds move, None for what the run's summaries say.
    """
    if moved is None:
        moved = {(s.variant, s.workload): s.round_bytes for s in run.summaries}
    card, requests = run.card, run.requests
    own = [check for check in run.checks if check.name not in TEXT_CHECKS]
    checks = (*own, *text_checks(card, requests))
    summaries = summarise_run(card, requests, moved, run.read_rate)
    flags = find_flags(card, run.machine, run.conditions, requests, summaries, run.partial, run.on_gpu)
    last = max((r.at_s + r.end_ms / 1e3 for r in requests), default=0.0)
    return dataclasses.replace(
        run,
        duration_s=max(run.duration_s, last),
        summaries=summaries,
        verdicts=verdicts_of(card, requests),
        checks=checks,
        flags=(*flags, *(flag for flag in run.flags if flag.kind in OF_PROMPTS)),
        passed=all(check.passed is not False for check in checks) and not any(r.error for r in requests),
    )
