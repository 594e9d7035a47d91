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
from soloist.ops.gqa import Place


class Backlog:
    """Rows of consecutive places, oldest first."""

    def __init__(self) -> None:
        self._rows: list[tuple[Output, torch.Tensor]] = []

    def clear(self) -> None:
        self._rows.clear()

    def takes(self, out: Output, following: torch.Tensor) -> bool:
        """Keep the row of a plain round for later. False for any other pass, which must be seen at once."""
        window = out.window
        if window.width or window.prefill or window.positions.device.type != "cpu":
            return False
        self._rows.append((out, following))
        return True

    def passes(self) -> Iterator[tuple[Output, torch.Tensor, torch.Tensor]]:
        """What is kept, as `observe` takes it, in passes no longer than a window, whose rows have the bits of single ones."""
        rows, self._rows = self._rows, []
        for begin in range(0, len(rows), MAX_WINDOW):
            outs, following = zip(*rows[begin : begin + MAX_WINDOW], strict=True)
            yield _joined(outs), torch.cat(following), torch.tensor([len(outs)])


def _joined(outs: tuple[Output, ...]) -> Output:
    windows = [out.window for out in outs]
    places = [window.place for window in windows]
    place = Place(places[0].start, torch.cat([p.page for p in places]), torch.cat([p.offset for p in places]), None)
    window = replace(windows[-1], positions=torch.cat([w.positions for w in windows]), place=place, rows=None)
    taps = tuple(torch.cat(rows) for rows in zip(*(out.taps for out in outs), strict=True))
    return Output(torch.cat([out.ids for out in outs]), window, torch.cat([out.hidden for out in outs]), taps)
