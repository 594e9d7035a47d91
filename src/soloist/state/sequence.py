"""The state of the running sequence: a window gives room, `commit(n)` keeps its first n tokens, the rest never happened.

Positional caches need nothing for that: readers stop at the length, the next window overwrites what lies beyond.
Recurrent matrices are kept after every token of a window, in the T slots after the live one, round the end; committing n
makes the n-th of them live, and 0 leaves the live one, which no window overwrites.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from soloist.ops.gqa import Place
from soloist.state.pages import PAGE_SIZE, Pages


@dataclass(frozen=True)
class PagedSpec:
    """A positional cache: an entry of `width` a position and head, [pages, heads, PAGE_SIZE, width]."""

    heads: int
    width: int
    dtype: torch.dtype


@dataclass(frozen=True)
class RecurrentSpec:
    """A recurrent layer: its conv inputs by position and its matrices [H, Dk, Dv] by slot."""

    channels: int
    conv_width: int
    state: tuple[int, int, int]
    dtype: torch.dtype


CacheSpec = PagedSpec | RecurrentSpec


@dataclass(frozen=True)
class Recurrent:
    """history [R, channels], position p in row p mod R; states [slots, H, Dk, Dv] fp32."""

    history: torch.Tensor
    states: torch.Tensor
    conv_width: int


@dataclass(frozen=True)
class Window:
    """Room for T tokens after the committed ones, as the layers see it.

    positions [T] int64; place: see Place; live [1] int64, the recurrent slot to start from; base_length [1] int64, the
    prompt's length, which one rope variant depends on; num_positions: a host number not below the position after the
    window, exact in prefill; prefill: every token of the window is known to stay.
    """

    positions: torch.Tensor
    place: Place
    live: torch.Tensor
    base_length: torch.Tensor
    num_positions: int
    prefill: bool

    @property
    def width(self) -> int:
        """Tokens that may be drafted: the first row is the anchor's."""
        return self.positions.shape[0] - 1

    def row(self, j: int) -> Window:
        """The room of its j-th token alone, in a round."""
        place = self.place
        alone = Place(place.start + j, place.page[j : j + 1], place.offset[j : j + 1], place.table)
        return replace(self, positions=self.positions[j : j + 1], place=alone)

    @property
    def num_pages(self) -> int:
        return -(-self.num_positions // PAGE_SIZE)

    def pages(self, cache: torch.Tensor) -> torch.Tensor:
        """The part of a paged cache that `place` speaks of."""
        return cache[: self.num_pages] if self.place.table is None else cache


@dataclass(frozen=True)
class Snapshot:
    """A sequence between two rounds: its page chain, and copies of what is overwritten in place."""

    length: int
    pages: tuple[int, ...]
    histories: tuple[torch.Tensor, ...]
    matrices: tuple[torch.Tensor, ...]
    base_length: int


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On the CPU the memory is taken page by page as it is first written, so a long context costs nothing yet."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)


class Sequence:
    """Caches and counters of one sequence.

    length [1] int64 on the device: committed positions. Window tokens take the positions after it.
    `spare_pages` are there for snapshots, which share full pages and make the running sequence copy its last one.
    """

    def __init__(
        self,
        specs: list[CacheSpec],
        context_length: int,
        max_window: int,
        device: torch.device,
        spare_pages: int = 4,
    ):
        num_pages = -(-(context_length + max_window) // PAGE_SIZE) + spare_pages  # the last window may stick out
        self.device, self.context_length, self.max_window = device, context_length, max_window
        self.pages = Pages(num_pages, device)
        self.length = torch.zeros(1, dtype=torch.int64, device=device)
        self.live = torch.zeros(1, dtype=torch.int64, device=device)
        self.base_length = torch.zeros(1, dtype=torch.int64, device=device)
        self.caches: list[torch.Tensor | Recurrent] = [
            self._paged(spec, num_pages) if isinstance(spec, PagedSpec) else self._recurrent(spec) for spec in specs
        ]

    def _paged(self, spec: PagedSpec, num_pages: int) -> torch.Tensor:
        return zeros((num_pages, spec.heads, PAGE_SIZE, spec.width), spec.dtype, self.device)

    def _recurrent(self, spec: RecurrentSpec) -> Recurrent:
        rows = self.max_window + spec.conv_width - 1
        history = torch.zeros((rows, spec.channels), dtype=spec.dtype, device=self.device)
        states = torch.zeros((self.max_window + 1, *spec.state), dtype=torch.float32, device=self.device)
        return Recurrent(history, states, spec.conv_width)

    def add(self, spec: PagedSpec) -> torch.Tensor:
        """A cache beside the model's, for a drafter: in the same pages, so snapshots hold it too."""
        cache = self._paged(spec, len(self.pages.table))
        self.caches.append(cache)
        return cache

    @property
    def recurrent(self) -> list[Recurrent]:
        return [cache for cache in self.caches if isinstance(cache, Recurrent)]

    def reset(self, base_length: int) -> None:
        """Start a new sequence whose prompt has `base_length` tokens."""
        self.pages.clear()
        self.length.zero_()
        self.live.zero_()
        self.base_length.fill_(base_length)
        for cache in self.recurrent:
            cache.history.zero_()
            cache.states[0].zero_()

    def window(self, T: int, bound: int) -> Window:
        """Room for T tokens in a round. `bound`: a host number not below length + T."""
        return self._window(T, bound, None)

    def prefill_window(self, T: int, start: int) -> Window:
        """Room for T tokens in prefill, where the host knows that `start` positions are committed."""
        return self._window(T, start + T, start)

    def _window(self, T: int, bound: int, start_host: int | None) -> Window:
        assert bound <= self.context_length + self.max_window, (bound, self.context_length)
        self.pages.reserve(bound)
        positions = self.length + torch.arange(T, device=self.device)
        if self.pages.in_order:
            table, page = None, positions // PAGE_SIZE
        else:
            table = self.pages.table[: -(-bound // PAGE_SIZE)]
            page = self.pages.table[positions // PAGE_SIZE]
        place = Place(positions[:1], page, positions % PAGE_SIZE, table, start_host)
        prefill = start_host is not None
        return Window(positions, place, self.live, self.base_length, bound, prefill)

    @property
    def counters(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """What a commit advances: length, live, and the number of slots that live goes round in."""
        return self.length, self.live, self.max_window + 1

    def commit(self, n: torch.Tensor) -> None:
        """Keep the first n [1] tokens of the last window; n on the device, 0 keeps none."""
        self.length += n
        self.live.add_(n).remainder_(self.max_window + 1)

    def commit_prefill(self, T: int) -> None:
        """Keep all T tokens of a prefill window: its recurrent state lies in slot 0."""
        self.length += T
        self.live.zero_()

    def snapshot(self) -> Snapshot:
        """The sequence as it is now. Between rounds only; reads the length."""
        length_host = int(self.length)
        taken = Snapshot(
            length_host,
            self.pages.share(length_host),
            tuple(self._last_inputs(cache, length_host) for cache in self.recurrent),
            tuple(cache.states.index_select(0, self.live)[0] for cache in self.recurrent),
            int(self.base_length),
        )
        self._own_page(length_host)
        return taken

    def _last_inputs(self, cache: Recurrent, length: int) -> torch.Tensor:
        """Conv inputs of the positions length - W + 1 .. length - 1: [W - 1, channels]."""
        return cache.history[self._history_rows(cache, length)].clone()

    def _history_rows(self, cache: Recurrent, length: int) -> torch.Tensor:
        rows = torch.arange(length - cache.conv_width + 1, length, device=self.device)
        return rows % cache.history.shape[0]

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot, which stays valid."""
        self.pages.adopt(snapshot.pages)
        self.length.fill_(snapshot.length)
        self.live.zero_()
        self.base_length.fill_(snapshot.base_length)
        for cache, inputs, matrix in zip(self.recurrent, snapshot.histories, snapshot.matrices, strict=True):
            cache.history[self._history_rows(cache, snapshot.length)] = inputs
            cache.states[0] = matrix
        self._own_page(snapshot.length)

    def _own_page(self, position: int) -> None:
        copied = self.pages.own(position)
        if copied is not None:
            source, target = copied
            for cache in self.caches:
                if isinstance(cache, torch.Tensor):
                    cache[target] = cache[source]

    def release(self, snapshot: Snapshot) -> None:
        """Let go of the pages a snapshot holds."""
        self.pages.release(snapshot.pages)

    def state_bytes(self) -> int:
        """Bytes of all caches."""
        tensors = [t for c in self.caches for t in ((c,) if isinstance(c, torch.Tensor) else (c.history, c.states))]
        return sum(t.numel() * t.element_size() for t in tensors)
