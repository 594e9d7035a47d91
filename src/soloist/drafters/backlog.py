"""The rows of plain rounds, which a drafter on a CPU need not look at before it drafts again.

A drafter with state costs time also where nothing is drafted: NEXTN runs a whole layer over every committed row. Where
drafting does not pay that alone would make decoding slower than plain. So a plain round leaves its row here, and the next
proposal begins with all of them in few passes. What they cost then is part of that round's duration, by which the width is
chosen. On other devices a captured round does the same work every time, so there rows are seen at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from soloist.config import MAX_WINDOW
from soloist.models.decoder import Output

MOST_ROWS = 1024
"""A row holds hidden states, so they may not wait without end."""

Seen = tuple[Output, torch.Tensor, torch.Tensor]
"""What `observe` takes: out, following, n."""


class Backlog:
    """Rows of consecutive places, oldest first."""

    def __init__(self) -> None:
        self._rows: list[tuple[Output, torch.Tensor]] = []

    def clear(self) -> None:
        self._rows.clear()

    def add(self, out: Output, following: torch.Tensor, n: torch.Tensor) -> Iterator[Seen]:
        """The passes that must be seen now: none for a row that can wait, otherwise all that wait and then this one."""
        if self._can_wait(out):
            self._rows.append((out, following))
        else:
            yield from self.passes()
            yield out, following, n

    def passes(self) -> Iterator[Seen]:
        """All that wait, in passes no longer than a window, whose rows have the bits of single ones."""
        rows, self._rows = self._rows, []
        for begin in range(0, len(rows), MAX_WINDOW):
            outs, following = zip(*rows[begin : begin + MAX_WINDOW], strict=True)
            yield _joined(outs), torch.cat(following), torch.tensor([len(outs)])

    def _can_wait(self, out: Output) -> bool:
        plain = out.window.width == 0 and not out.window.prefill
        return plain and out.ids.device.type == "cpu" and len(self._rows) < MOST_ROWS


def _joined(outs: tuple[Output, ...]) -> Output:
    windows = [out.window for out in outs]
    places = [window.place for window in windows]
    place = replace(places[0], page=torch.cat([p.page for p in places]), offset=torch.cat([p.offset for p in places]))
    window = replace(windows[-1], positions=torch.cat([w.positions for w in windows]), place=place, rows=None)
    taps = tuple(torch.cat(rows) for rows in zip(*(out.taps for out in outs), strict=True))
    return Output(torch.cat([out.ids for out in outs]), window, torch.cat([out.hidden for out in outs]), taps)
