"""The state of the running sequence: a window gives room, `commit(n)` keeps its first n tokens, the rest never happened.

Positional caches need nothing for that: readers stop at the length, the next window overwrites what lies beyond. They
are stored in pages, which lie in the order of the positions: there is one sequence, so no table is needed to find them.
Recurrent matrices are kept after every token of a window, in the T slots after the live one, round the end; committing n
makes the n-th of them live, and 0 leaves the live one, which no window overwrites.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from soloist.ops.gqa import Place
from soloist.ops.window_places import window_places

PAGE_SIZE = 128
"""Positions a page."""


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
    window, exact in prefill; prefill: every token of the window is known to stay. rows [1] int64: of how many tokens, the
    first ones, the results are wanted; None for all. Layers may leave out the work of the others.
    """

    positions: torch.Tensor
    place: Place
    live: torch.Tensor
    base_length: torch.Tensor
    num_positions: int
    prefill: bool
    rows: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """Tokens that may be drafted: the first row is the anchor's."""
        return self.positions.shape[0] - 1

    def row(self, j: int) -> Window:
        """The room of its j-th token alone, in a round."""
        return replace(self._cut(j, j + 1), rows=None)

    def first(self, T: int) -> Window:
        """The room of its first T tokens, in a round."""
        return self._cut(0, T)

    def _cut(self, begin: int, end: int) -> Window:
        place = self.place
        part = Place(place.start + begin if begin else place.start, place.page[begin:end], place.offset[begin:end], place.table)
        return replace(self, positions=self.positions[begin:end], place=part)

    @property
    def num_pages(self) -> int:
        return -(-self.num_positions // PAGE_SIZE)

    def pages(self, cache: torch.Tensor) -> torch.Tensor:
        """The part of a paged cache that `place` speaks of."""
        return cache[: self.num_pages] if self.place.table is None else cache


@dataclass(frozen=True)
class Recurrence:
    """Where the recurrent layers stand behind a position: copies of their last conv inputs [W - 1, channels] and of
    their matrices [H, Dk, Dv]. Such a layer cannot go back, so only where one of these was taken can a text be resumed.
    """

    histories: tuple[torch.Tensor, ...] = ()
    matrices: tuple[torch.Tensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.histories, *self.matrices))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On the CPU the memory is taken page by page as it is first written, so a long context costs nothing yet."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)


class Sequence:
    """Caches and counters of one sequence.

    length [1] int64 on the device: committed positions. Window tokens take the positions after it.
    num_resets: sequences begun so far; as long as it stays, what was written before the length is still there.
    """

    def __init__(self, specs: list[CacheSpec], context_length: int, max_window: int, device: torch.device):
        self.num_pages = -(-(context_length + max_window) // PAGE_SIZE)  # the last window may stick out
        self.device, self.context_length, self.max_window = device, context_length, max_window
        self.num_resets = 0
        self.length = torch.zeros(1, dtype=torch.int64, device=device)
        self.live = torch.zeros(1, dtype=torch.int64, device=device)
        self.base_length = torch.zeros(1, dtype=torch.int64, device=device)
        self.caches: list[torch.Tensor | Recurrent] = [
            self._paged(spec) if isinstance(spec, PagedSpec) else self._recurrent(spec) for spec in specs
        ]

    def _paged(self, spec: PagedSpec) -> torch.Tensor:
        return zeros((self.num_pages, spec.heads, PAGE_SIZE, spec.width), spec.dtype, self.device)

    def _recurrent(self, spec: RecurrentSpec) -> Recurrent:
        rows = self.max_window + spec.conv_width - 1
        history = torch.zeros((rows, spec.channels), dtype=spec.dtype, device=self.device)
        states = torch.zeros((self.max_window + 1, *spec.state), dtype=torch.float32, device=self.device)
        return Recurrent(history, states, spec.conv_width)

    def add(self, spec: PagedSpec) -> torch.Tensor:
        """A cache beside the model's, for a drafter: indexed by the same positions, and kept with them."""
        cache = self._paged(spec)
        self.caches.append(cache)
        return cache

    @property
    def positional(self) -> list[torch.Tensor]:
        return [cache for cache in self.caches if isinstance(cache, torch.Tensor)]

    @property
    def recurrent(self) -> list[Recurrent]:
        return [cache for cache in self.caches if isinstance(cache, Recurrent)]

    def reset(self, base_length: int) -> None:
        """Start a new sequence whose prompt has `base_length` tokens."""
        self.num_resets += 1
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
        positions, page, offset = window_places(self.length, T, PAGE_SIZE)
        place = Place(positions[:1], page, offset, None, start_host)
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

    def rows(self, start: int, end: int) -> tuple[torch.Tensor, ...]:
        """Copies of what the positional caches hold at start .. end - 1: [end - start, heads, width] each."""
        page, offset = self._places(start, end)
        return tuple(cache[page, :, offset] for cache in self.positional)

    def put_rows(self, start: int, rows: tuple[torch.Tensor, ...]) -> None:
        """Write copied rows back to the positions from `start` on. Caches added since they were taken keep theirs."""
        page, offset = self._places(start, start + rows[0].shape[0])
        for cache, copied in zip(self.positional, rows, strict=False):
            cache[page, :, offset] = copied

    def _places(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(start, end, device=self.device)
        return positions // PAGE_SIZE, positions % PAGE_SIZE

    def recurrence(self) -> Recurrence:
        """Where the recurrent layers stand now. Between rounds only; reads the length."""
        length_host = int(self.length) if self.recurrent else 0
        return Recurrence(
            tuple(cache.history[self._last_inputs(cache, length_host)] for cache in self.recurrent),
            tuple(cache.states.index_select(0, self.live)[0] for cache in self.recurrent),
        )

    def _last_inputs(self, cache: Recurrent, length: int) -> torch.Tensor:
        """Where the history keeps the positions length - W + 1 .. length - 1."""
        rows = torch.arange(length - cache.conv_width + 1, length, device=self.device)
        return rows % cache.history.shape[0]

    def resume(self, length: int, recurrence: Recurrence) -> None:
        """Continue behind `length` positions, whose rows must be in place. Call after `reset`."""
        self.length.fill_(length)
        self.live.zero_()
        for cache, inputs, matrix in zip(self.recurrent, recurrence.histories, recurrence.matrices, strict=True):
            cache.history[self._last_inputs(cache, length)] = inputs
            cache.states[0] = matrix

    def state_bytes(self) -> int:
        """Bytes of all caches."""
        tensors = [t for c in self.caches for t in ((c,) if isinstance(c, torch.Tensor) else (c.history, c.states))]
        return sum(t.numel() * t.element_size() for t in tensors)
