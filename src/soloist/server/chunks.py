"""A stream's chunks as bytes. All that does not change from round to round is written once, before the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from soloist.server.answers import Clock, Counts, final_timings
from soloist.server.prepare import Prompt
from soloist.server.voices import Voice, encode
from soloist.server.wire import Sampling
from soloist.server.worker import Round

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Head:
    """What every chunk of an answer repeats."""

    id: str
    object: str
    created: int
    model: str


class Chunks:
    """Args: voices, prompts: one for each choice; counts: kept up to date; started: perf_counter at the first's turn;
    prompt_ids: whether the first chunk carries the prompt's ids at its top, as chat answers do.
    """

    def __init__(
        self,
        head: Head,
        request: Sampling,
        voices: Sequence[Voice],
        prompts: Sequence[Prompt],
        counts: Counts,
        queue_ms: float,
        started: float,
        prompt_ids: bool,
    ):
        opening = b'data: {"id":%b,"object":%b,"created":%d,"model":%b' % (
            encode(head.id), encode(head.object), head.created, encode(head.model),
        )  # fmt: skip
        self._opening = opening
        self._openings = [opening + b',"choices":[{"index":%d,' % index for index in range(len(voices))]
        self._voices, self._counts, self._queue_ms = voices, counts, queue_ms
        options = request.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._running_usage = bool(options and options.continuous_usage_stats)
        self._ids = bool(request.return_token_ids)
        self._timings, self._clock = bool(request.timings), None
        if request.timings_per_token:
            self._clock = Clock(started, queue_ms, len(prompts[0].ids))
        self._once = b',"prompt_token_ids":' + encode(prompts[0].ids) if prompt_ids and self._ids else b""

    def chunk(self, one: Round) -> bytes:
        """The message of one round, whose tokens are counted already."""
        voice, event = self._voices[one.choice], one.event
        parts = [self._openings[one.choice], voice.piece(event), b',"finish_reason":']
        if event.output is None:
            parts.append(b"null")
        else:
            parts += [encode(voice.finish(event.output)), b',"stop_reason":', encode(event.output.stop_reason)]
        if self._ids:
            parts += [b',"token_ids":', encode(event.token_ids)]
        parts.append(b"}]")
        if self._running_usage:
            parts += [b',"usage":', encode(self._counts.usage())]
        elif self._with_usage:
            parts.append(b',"usage":null')
        if self._clock is not None or self._timings:
            parts.append(self._times(one))
        parts += [self._once, b"}\n\n"]
        self._once = b""
        return b"".join(parts)

    def _times(self, one: Round) -> bytes:
        times = {} if self._clock is None else self._clock.take(one.event, one.at)
        if self._timings and one.event.output is not None:
            times |= final_timings(self._queue_ms, one.event.output)
        return b',"timings":' + encode(times) if times else b""

    def end(self) -> bytes:
        """The counts, where they were asked for, and the end of the stream."""
        if not self._with_usage:
            return DONE
        return self._opening + b',"choices":[],"usage":%b}\n\n' % encode(self._counts.usage()) + DONE
