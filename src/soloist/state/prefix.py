"""What earlier prompts left behind, so that a prompt which begins like one of them is not computed from its start.

Texts form a tree of units: so many tokens in a row, behind those of their ancestors. For every unit it is known where the
rows of its positions are, and at some units how the recurrent layers stood behind them; a request can begin only there.
All of it was written by prefill, at places where a prompt may be cut without changing a bit: a request that begins
there goes through the passes that a fresh engine would run, or through passes that give the same bits. What decoding
writes differs from that in the last digits and is never reused; so neither drafts nor aborted answers can leave traces.

The units of the last prompt lie in the sequence itself and cost nothing. They are copied only if another text is about to
overwrite them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from soloist.state.sequence import Recurrence, Sequence

MARGIN = 8
"""Last tokens of a prompt before which its recurrence is taken: templates write the end of a prompt differently once an
answer follows it, as where a line that asks for reasoning becomes empty reasoning."""

SPACING = 4096
"""Positions from one recurrence to the next inside a long prompt, for prompts that leave it midway."""


@dataclass(eq=False)
class Unit:
    """key: its tokens and the one behind them, on which a drafter's last row depends; end: positions up to here.

    rows: copies of the positional caches' rows, None while they are in the sequence; recurrence: None where no request
    can begin; used: the last request that began or passed here.
    """

    parent: Unit | None
    key: tuple[int, ...]
    end: int
    used: int
    rows: tuple[torch.Tensor, ...] | None = None
    recurrence: Recurrence | None = None
    children: dict[tuple[int, ...], Unit] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        rows = sum(t.numel() * t.element_size() for t in self.rows or ())
        return rows + (self.recurrence.num_bytes if self.recurrence else 0)

    def below(self) -> Iterator[Unit]:
        """All units behind this one."""
        stack = list(self.children.values())
        while stack:
            unit = stack.pop()
            yield unit
            stack += unit.children.values()


class PrefixCache:
    """Args: size: positions of a unit; budget_bytes: of copied rows and recurrences together, 0 turns reuse off.

    num_bytes: what is held now. begun: positions of the last prompt that were in place when it began. stops: where its
    prefill is to pause for `keep`, beside the places where it does anyway.
    """

    def __init__(self, sequence: Sequence, size: int, budget_bytes: int):
        self.sequence, self.size, self.budget_bytes = sequence, size, budget_bytes
        self.num_bytes, self.begun = 0, 0
        self._roots: dict[int, Unit] = {}
        self._request = 0
        self._prompt: tuple[int, ...] = ()
        self.stops: set[int] = set()
        self._in_place: list[Unit] = []  # the path of the last request, whose rows the sequence holds
        self._tip = Unit(None, (), 0, 0)
        self._resets = -1

    def begin(self, prompt: tuple[int, ...], variant: int = 0) -> None:
        """Reset the sequence for a prompt, and put its longest known beginning there; `begun` says how long that is.

        At least one token is left to compute. variant: texts of different ones have different states for one token.
        """
        self._prompt, self.stops, self.begun, now = prompt, set(), 0, self._request + 1
        if not self.budget_bytes:
            self.sequence.reset(len(prompt))
            return
        self._forget_overwritten()
        root = self._roots.setdefault(variant, Unit(None, (), 0, 0))
        known = self._known(root)
        depth = max((i + 1 for i, unit in enumerate(known) if unit.recurrence is not None), default=0)
        path = known[:depth]
        for unit in known[max(depth - 1, 0) :]:
            unit.used = now
        self._request = now
        self._save(self._shared(path))
        self._restore(path)
        self._tip = path[-1] if path else root
        self.begun = self._tip.end
        self._plan(known[depth:])

    def keep(self, end: int) -> None:
        """Remember the prompt's first `end` tokens, which have just been committed by prefill."""
        if not self.budget_bytes:
            return
        while (reached := self._tip.end + self.size) <= min(end, len(self._prompt) - 1):
            self._advance(reached)
        tip, wanted = self._tip, end in self.stops or not self.sequence.recurrent
        if tip.end == end and wanted and tip.recurrence is None:
            recurrence = self.sequence.recurrence()
            if self._make_room(recurrence.num_bytes, self._request):
                tip.recurrence = recurrence
                self.num_bytes += recurrence.num_bytes

    def _advance(self, reached: int) -> None:
        key = self._prompt[self._tip.end : reached + 1]
        unit = self._tip.children.get(key)
        if unit is None:
            unit = self._tip.children[key] = Unit(self._tip, key, reached, self._request)
        if not self.sequence.recurrent:
            unit.recurrence = Recurrence()
        unit.used = self._request
        self._in_place.append(unit)
        self._tip = unit

    def _forget_overwritten(self) -> None:
        """Somebody else may have used the sequence: what only lay there is lost."""
        if self.sequence.num_resets == self._resets:
            return
        lost = next((unit for unit in self._in_place if unit.rows is None), None)
        if lost is not None:
            self._drop(lost)
        self._in_place = []

    def _known(self, root: Unit) -> list[Unit]:
        """The units with which the prompt begins, all but its last token at most."""
        found, unit = list[Unit](), root
        while True:
            key = self._prompt[unit.end : unit.end + self.size + 1]
            following = unit.children.get(key)
            if following is None:
                return found
            found.append(following)
            unit = following

    def _shared(self, path: list[Unit]) -> int:
        """How many of its first units are in place."""
        pairs = zip(path, self._in_place, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a is not b), min(len(path), len(self._in_place)))

    def _save(self, kept: int) -> None:
        """Copy the rows that the coming request will overwrite, as far as older requests leave room."""
        for unit in self._in_place[kept:]:
            if unit.rows is not None:
                continue
            rows = self.sequence.rows(unit.end - self.size, unit.end)
            needed = sum(t.numel() * t.element_size() for t in rows)
            fits = self._make_room(needed, self._request - 1)
            if unit.parent is None:  # it made room itself, being the last
                break
            if not fits:
                self._drop(unit)
                break
            unit.rows = rows
            self.num_bytes += needed
        del self._in_place[kept:]

    def _restore(self, path: list[Unit]) -> None:
        self.sequence.reset(len(self._prompt))
        self._resets = self.sequence.num_resets
        for unit in path[len(self._in_place) :]:
            assert unit.rows is not None, unit.end
            self.sequence.put_rows(unit.end - self.size, unit.rows)
            self._in_place.append(unit)
        if path:
            assert path[-1].recurrence is not None
            self.sequence.resume(path[-1].end, path[-1].recurrence)

    def _plan(self, untaken: list[Unit]) -> None:
        """Where recurrences are to be taken: near the prompt's end, where it leaves known texts, and now and then."""
        if not self.sequence.recurrent:
            return
        S = len(self._prompt)
        spacing = max(SPACING // self.size, 1) * self.size
        self.stops.update(range(spacing, S, spacing))
        self.stops.add((S - MARGIN) // self.size * self.size)
        self.stops.update(unit.end for unit in untaken[-1:])
        self.stops = {stop for stop in self.stops if self.begun < stop < S}

    def _make_room(self, needed: int, newest: int) -> bool:
        """Give up what was used least lately, by request `newest` at the latest; False if that is not enough.

        Of one request first the inner recurrences from the left, which stand in for less than those to their right.
        """
        while self.num_bytes + needed > self.budget_bytes:
            idle = [unit for root in self._roots.values() for unit in root.below() if self._can_go(unit, newest)]
            if not idle:
                return False
            unit = min(idle, key=lambda u: (u.used, not u.children, u.end))
            if unit.children or unit.used == self._request:
                self._forget_recurrence(unit)
            else:
                self._drop(unit)
        return True

    def _can_go(self, unit: Unit, newest: int) -> bool:
        recurrent = unit.recurrence is not None and unit.recurrence.num_bytes > 0
        if unit.children or unit.used == self._request:
            return recurrent and unit.used <= newest
        return unit.num_bytes > 0 and unit.used <= newest

    def _forget_recurrence(self, unit: Unit) -> None:
        assert unit.recurrence is not None
        self.num_bytes -= unit.recurrence.num_bytes
        unit.recurrence = None

    def _drop(self, unit: Unit) -> None:
        """Forget a unit and all behind it."""
        assert unit.parent is not None
        del unit.parent.children[unit.key]
        self.num_bytes -= sum(each.num_bytes for each in (unit, *unit.below()))
        unit.parent = None
