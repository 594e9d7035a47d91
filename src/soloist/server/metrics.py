"""Counts for Prometheus, in its text format. They change once a request, never in the stream."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
TOKENS_PER_ROUND = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0)


class Counter:
    """Grows only. labels: their names; each combination of values is counted apart."""

    kind = "counter"

    def __init__(self, name: str, text: str, labels: tuple[str, ...] = ()):
        self.name, self.text, self._labels = name, text, labels
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def add(self, amount: float = 1, *labels: str) -> None:
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def lines(self) -> Iterable[str]:
        for labels, value in self._values.items():
            pairs = ",".join(f'{name}="{label}"' for name, label in zip(self._labels, labels, strict=True))
            yield f"{self.name}{{{pairs}}} {value:g}" if pairs else f"{self.name} {value:.17g}"


class Gauge(Counter):
    """What is so at the time of asking."""

    kind = "gauge"

    def set(self, value: float) -> None:
        self._values[()] = value


class Histogram:
    kind = "histogram"

    def __init__(self, name: str, text: str, bounds: tuple[float, ...] = SECONDS):
        self.name, self.text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float | None) -> None:
        if value is not None:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def lines(self) -> Iterable[str]:
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            yield f'{self.name}_bucket{{le="{"+Inf" if bound == float("inf") else f"{bound:g}"}"}} {total}'
        yield f"{self.name}_sum {self._sum:.9g}"
        yield f"{self.name}_count {total}"


class Metrics:
    """Everything that /metrics says."""

    def __init__(self) -> None:
        self.ready = Gauge("soloist_ready", "1 while requests are taken")
        self.running = Gauge("soloist_requests_running", "Requests in the slot: 0 or 1")
        self.waiting = Gauge("soloist_requests_waiting", "Requests in the queue")
        self.responses = Counter("soloist_http_responses_total", "Responses", ("path", "status"))
        self.finished = Counter("soloist_choices_finished_total", "Answers, by why they ended", ("reason",))
        self.cancelled = Counter("soloist_requests_cancelled_total", "Requests that were cut off", ("reason",))
        self.prompt = Counter("soloist_prompt_tokens_total", "Prompt tokens, with cached ones")
        self.cached = Counter("soloist_cached_tokens_total", "Prompt tokens that were not computed again")
        self.generated = Counter("soloist_generated_tokens_total", "Tokens of answers")
        self.rounds = Counter("soloist_rounds_total", "Verify rounds, prefill apart")
        self.drafted = Counter("soloist_drafted_tokens_total", "Tokens that were proposed and verified")
        self.accepted = Counter("soloist_accepted_tokens_total", "Proposed tokens that became part of an answer")
        self.queue = Histogram("soloist_queue_seconds", "From arrival to the slot")
        self.ttft = Histogram("soloist_time_to_first_token_seconds", "From the slot to the first token")
        self.tpot = Histogram("soloist_time_per_output_token_seconds", "Mean after the first, by answer", TOKEN_SECONDS)
        self.total = Histogram("soloist_request_seconds", "From arrival to the end")
        self.acceptance = Histogram("soloist_acceptance_length", "Tokens a round, mean by answer", TOKENS_PER_ROUND)

    def render(self) -> bytes:
        lines: list[str] = []
        for metric in vars(self).values():
            lines += [f"# HELP {metric.name} {metric.text}", f"# TYPE {metric.name} {metric.kind}", *metric.lines()]
        return ("\n".join(lines) + "\n").encode()
