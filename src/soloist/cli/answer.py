"""An answer in the terminal: its text on stdout as it comes, and on stderr how it goes and how it went."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import closing
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from soloist.config import Plan, SamplingParams, terminal_is_dumb

if TYPE_CHECKING:
    from soloist.llm import LLM, Output, Prompt, StreamEvent

REDRAW_S = 0.1

VISIBLE = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""For terminals: a model may write control characters, and must not steer the terminal with them."""


def answer(llm: LLM, prompt: Prompt, params: SamplingParams, quiet: bool = False) -> Output:
    """Run a request; unless quiet, its text goes to stdout round by round, token ids where there is no tokenizer.

    Ctrl+C ends it after the current round with finish_reason `cancelled`.
    Raises: UserError for what the model refuses; KeyboardInterrupt at a second Ctrl+C.
    """
    text, count, first = "", 0, 0.0
    stream = closing(llm.stream(prompt, params))  # type: ignore[type-var]
    with stream as events, StopKey(llm) as key, StatusLine(quiet) as status:
        status.show("reading the prompt")
        for event in events:
            if not quiet:
                text = _shown(event, with_text=llm.tokenizer is not None)
                sys.stdout.write(text)
                sys.stdout.flush()
            if event.output is not None:
                break
            first = first or time.perf_counter()
            count += len(event.token_ids)
            status.progress(count, time.perf_counter() - first)
            if key.pressed:
                llm.cancel()  # again: the first press may have come before the request began
    if not quiet and not text.endswith("\n"):
        print()
    assert event.output is not None
    return event.output


def _shown(event: StreamEvent, with_text: bool) -> str:
    if not with_text:
        return "".join(f"{token} " for token in event.token_ids)
    return event.text.translate(VISIBLE) if sys.stdout.isatty() else event.text


def summary(output: Output, plan: Plan) -> str:
    """One line: counts, time to first token, time a token, rate, what drafting brought, why it ended."""
    times = output.timings
    parts = [
        f"{output.usage.completion_tokens} tokens",
        f"TTFT {times.ttft_ms:.0f} ms ({_prompt(output)})",
    ]
    if times.tpot_ms:
        parts += [f"{times.tpot_ms:.2f} ms per token", f"{1e3 / times.tpot_ms:.1f} tok/s"]
    if plan.drafter != "none" and times.rounds:
        round_ms = times.decode_s * 1e3 / times.rounds
        parts.append(f"acceptance length {times.acceptance_length:.2f}, {round_ms:.2f} ms per round")
        if times.speedup is not None:
            parts.append(f"{times.speedup:.2f}x plain rounds of {times.plain_round_ms:.2f} ms")
    parts.append(_ending(output, plan))
    return " | ".join(parts if plan.caveat is None else [*parts, plan.caveat])


def _prompt(output: Output) -> str:
    usage = output.usage
    known = f", {usage.cached_tokens} of them known" if usage.cached_tokens else ""
    return f"{usage.prompt_tokens} prompt tokens{known}"


def _ending(output: Output, plan: Plan) -> str:
    if output.finish_reason == "length":
        full = output.usage.total_tokens >= plan.context_length
        return f"length (the context of {plan.context_length} is full)" if full else "length (max_tokens)"
    if output.finish_reason == "stop":
        reason = output.stop_reason
        if reason is None:
            return "stop (end of text)"
        return f"stop ({'string' if isinstance(reason, str) else 'id'} {reason!r})"
    return output.finish_reason


class StopKey:
    """Ctrl+C while an answer runs: once cancels the request, twice raises KeyboardInterrupt."""

    def __init__(self, llm: LLM):
        self._llm = llm
        self.pressed = False

    def __enter__(self) -> StopKey:
        self._ours = threading.current_thread() is threading.main_thread()  # only there may handlers be set
        if self._ours:
            self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, self._before)

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        self._llm.cancel()


class StatusLine:
    """One line of progress, where stderr is a terminal.

    If the text streams to the same terminal, the bottom row is taken out of the scrolling region for the line, so that
    the text never has to make way for it.
    """

    def __init__(self, quiet: bool = False):
        self._shared = sys.stdout.isatty() and not quiet
        self._on = sys.stderr.isatty() and not terminal_is_dumb()
        self._rows = 0
        self._next = 0.0

    def progress(self, count: int, seconds: float) -> None:
        """Show tokens so far and the rate since the first, at most every REDRAW_S."""
        if self._on and seconds >= self._next and count > 1:
            self._next = seconds + REDRAW_S
            self.show(f"{count} tokens, {(count - 1) / seconds:.1f} tok/s, Ctrl+C stops")

    def show(self, text: str) -> None:
        if not self._on:
            return
        columns, rows = os.get_terminal_size(sys.stderr.fileno())
        line = text[: columns - 1]
        if not self._shared:
            self._write(f"\r\x1b[K{line}")
            return
        if rows != self._rows:
            self._reserve(rows)
        self._write(f"\x1b7\x1b[{rows};1H\x1b[2K{line}\x1b8")

    def _reserve(self, rows: int) -> None:
        """Leave the cursor above the last row, scrolling if it is there, then let only the rows above scroll."""
        self._write(f"\x1bD\x1b[A\x1b7\x1b[1;{rows - 1}r\x1b8")
        self._rows = rows

    def _write(self, codes: str) -> None:
        sys.stderr.write(codes)
        sys.stderr.flush()

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rows:
            self._write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8")
        elif self._on:
            self._write("\r\x1b[K")
