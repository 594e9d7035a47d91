"""What a request's rounds did: times, acceptance, widths."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from soloist.drafters.width import WidthChoice
from soloist.runtime.runner import RoundResult


@dataclass(frozen=True)
class Timings:
    """ttft_ms: from the call to the first token id on the host. decode_s: from there to the last token. tpot_ms:
    decode_s a token after the first, None with one token. rounds: verify rounds. acceptance_length: tokens emitted
    after the first, a round; truncated at the end of the request. accepted_histogram[k]: rounds that emitted k tokens.
    drafted, verified: tokens proposed, and rows that counted in the model's rounds. width_histogram[k]: rounds that
    verified k drafts. acceptance_rates[k]: of the drafts at place k whose predecessors were accepted, the accepted
    share. plain_round_ms: measured median of a plain round, None where none ran lately. speedup: plain rounds for the
    same tokens, divided by decode_s.
    """

    ttft_ms: float
    tpot_ms: float | None
    decode_s: float
    rounds: int
    acceptance_length: float | None
    accepted_histogram: list[int]
    drafted: int
    verified: int
    width_histogram: list[int]
    acceptance_rates: list[float]
    plain_round_ms: float | None
    speedup: float | None


@dataclass
class RequestClock:
    """Takes the times and counts of a running request."""

    widths: WidthChoice
    begun: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    last: float = 0.0
    emitted: list[int] = field(default_factory=list)
    drafted: int = 0
    verified: list[int] = field(default_factory=list)
    trials: list[list[int]] = field(default_factory=list)

    def prefilled(self) -> None:
        self.first = self.last = time.perf_counter()

    def round(self, result: RoundResult, used: int) -> None:
        """A round of which the request used that many tokens."""
        self.last = time.perf_counter()
        self.emitted.append(used)
        self.drafted += result.drafted
        self.verified.append(result.verified)
        accepted = len(result.tokens) - 1
        judged = min(accepted + result.running, result.verified)  # the end of a request may hide a rejection
        while len(self.trials) < judged:
            self.trials.append([0, 0])
        for place, trial in enumerate(self.trials[:judged]):
            trial[place < accepted] += 1

    def timings(self) -> Timings:
        rounds, after_first = len(self.emitted), sum(self.emitted)
        decode, plain_ms = self.last - self.first, self.widths.plain_ms
        return Timings(
            ttft_ms=(self.first - self.begun) * 1e3,
            tpot_ms=decode * 1e3 / after_first if after_first else None,
            decode_s=decode,
            rounds=rounds,
            acceptance_length=after_first / rounds if rounds else None,
            accepted_histogram=histogram(self.emitted),
            drafted=self.drafted,
            verified=sum(self.verified) + rounds,
            width_histogram=histogram(self.verified),
            acceptance_rates=[yes / (no + yes) for no, yes in self.trials],
            plain_round_ms=plain_ms,
            speedup=plain_ms * after_first / (decode * 1e3) if plain_ms and after_first else None,
        )


def histogram(values: list[int]) -> list[int]:
    """How often each number from 0 to the largest occurs."""
    return [values.count(k) for k in range(max(values, default=0) + 1)]
