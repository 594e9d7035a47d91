"""How many tokens to draft: the width that promises most tokens a millisecond, judged by older rounds only.

With acceptance by equality no width changes the text, so the choice may look at anything and only costs or saves time.
A credit, in plain rounds, bounds what it can cost: a drafted round must be affordable even if all its drafts are
rejected, wins fill the credit, and plain rounds add a hundredth. So decoding is never slower than plain by more than
that hundredth and the credit a request starts with, however wrong the estimates are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Protocol

WIDTHS = (1, 2, 3, 5, 7, 11, 15)
"""Widths that `auto` chooses from: few, so that the cost of each is soon known."""

START_CREDIT, MOST_CREDIT, ALLOWANCE = 1.0, 16.0, 0.01
"""Plain rounds: at the start of a request, at most, and gained by every plain round."""

HYSTERESIS = 1.03
"""By how much another width must look better than the last one."""


class WidthChoice(Protocol):
    """Told of every round in order; asked for the width of the next, perhaps before it heard of the last."""

    @property
    def plain_ms(self) -> float | None:
        """Measured duration of a plain round, where one ran lately."""
        ...

    def begin(self, confidence: Sequence[float] | None) -> None:
        """A request begins; `confidence` of the drafter after the prompt."""
        ...

    def choose(self, sure: int = 0) -> int:
        """Tokens to draft in the round that is launched next. sure: how many drafts, the first, a grammar forces."""
        ...

    def learn(self, width: int, emitted: int, running: bool, ms: float, confidence: Sequence[float] | None) -> None:
        """What the oldest round not yet heard of brought, how long it took, and the drafter's confidence after it."""
        ...


class FixedWidth:
    """Always the same width."""

    plain_ms: float | None = None

    def __init__(self, width: int):
        self.width = width

    def begin(self, confidence: Sequence[float] | None) -> None:
        pass

    def choose(self, sure: int = 0) -> int:
        return self.width

    def learn(self, width: int, emitted: int, running: bool, ms: float, confidence: Sequence[float] | None) -> None:
        pass


class RoundCosts:
    """Milliseconds of a round for every width, from the rounds that ran.

    A width that never ran is interpolated, or extrapolated by an optimistic slope, so that it is tried. Old samples are
    forgotten: a round's cost grows with the context, and a new request starts with a short one.
    """

    SAMPLES, AGE, SLOPE = 7, 512, 0.03

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._heard: dict[int, int] = {}
        self._medians: dict[int, float] = {}
        self._round = 0

    def learn(self, width: int, ms: float) -> None:
        self._round += 1
        self._samples.setdefault(width, deque(maxlen=self.SAMPLES)).append(ms)
        self._medians[width], self._heard[width] = median(self._samples[width]), self._round
        for old in [w for w, heard in self._heard.items() if heard < self._round - self.AGE]:
            del self._samples[old], self._medians[old], self._heard[old]

    def measured(self, width: int) -> float | None:
        """Median of the last samples, None without any."""
        return self._medians.get(width)

    def __getitem__(self, width: int) -> float:
        """A narrower width, or this one, must have been measured."""
        below = max(w for w in self._medians if w <= width)
        above = min((w for w in self._medians if w > width), default=None)
        low = self._medians[below]
        if below == width or above is None:
            return low * (1 + self.SLOPE * (width - below))
        return low + (self._medians[above] - low) * (width - below) / (above - below)

    def at_most(self, width: int) -> float:
        """A window costs at most as much more as it has more rows."""
        below = max(w for w in self._medians if w <= width)
        return self._medians[below] * (width + 1) / (below + 1)


class Survival:
    """Chance that a draft is accepted given that those before it were: what the drafter says, corrected by experience.

    At every place the drafter's confidence (PRIOR where it has none) is multiplied by accepted / expected there.
    STRENGTH expected ones count as having gone as at the place before. Trials fade over MEMORY rounds, so that what was
    given up is tried again.
    """

    PRIOR, MEMORY, STRENGTH = 0.8, 64, 2.0

    def __init__(self, most: int):
        self._hits, self._expected = [0.0] * most, [0.0] * most

    def conditional(self, confidence: Sequence[float] | None) -> list[float]:
        """The corrected chance of every draft."""
        said = [self.PRIOR] * len(self._hits) if confidence is None else confidence
        chances, factor = [], 1.0
        for chance, hits, expected in zip(said, self._hits, self._expected, strict=True):
            factor = (hits + self.STRENGTH * factor) / (expected + self.STRENGTH)
            chances.append(min(1.0, chance * factor))
        return chances

    def learn(self, confidence: Sequence[float] | None, width: int, accepted: int, sure: int = 0) -> None:
        """The first rejected draft was the last trial; those behind it say nothing, nor do the `sure` first."""
        keep = 1 - 1 / self.MEMORY
        self._hits = [hits * keep for hits in self._hits]
        self._expected = [expected * keep for expected in self._expected]
        for j in range(sure, min(accepted + 1, width)):
            self._hits[j] += j < accepted
            self._expected[j] += self.PRIOR if confidence is None else confidence[j]


class AutoWidth:
    """The width with the most expected tokens a millisecond, as far as the credit reaches.

    most: the drafter's width. foresees: see Drafter; a confidence of the last proposal is taken for a forecast, but not
    once a plain round came after it. refresh: rounds after which a plain round is due, to know what drafting is worth.
    """

    def __init__(self, most: int, foresees: bool = False, refresh: int = 64):
        self.widths = [w for w in WIDTHS if w < most] + [most]
        self.costs, self.survival = RoundCosts(), Survival(most)
        self.credit, self.foresees, self.refresh = 0.0, foresees, refresh
        self._confidence: Sequence[float] | None = None
        # believed, credit set aside, sure drafts
        self._launched: deque[tuple[Sequence[float] | None, float, int]] = deque()
        self._last, self._since_plain = 0, 0

    @property
    def plain_ms(self) -> float | None:
        return self.costs.measured(0)

    def begin(self, confidence: Sequence[float] | None) -> None:
        self.credit = max(self.credit, START_CREDIT)
        self.survival = Survival(self.widths[-1])
        self._confidence = confidence if self.foresees else None
        self._launched.clear()
        self._last = 0

    def choose(self, sure: int = 0) -> int:
        stale = self.plain_ms is None or self._since_plain >= self.refresh
        self._last = 0 if stale else self._best(sure)
        self._since_plain = self._since_plain + 1 if self._last else 0
        risk = self._risk(self._last) if self._last else 0.0
        self.credit -= risk
        self._launched.append((self._confidence, risk, sure))
        return self._last

    def _risk(self, width: int) -> float:
        """Plain rounds lost if all drafts are rejected."""
        return self.costs.at_most(width) / self.costs[0] - 1

    def _best(self, sure: int) -> int:
        plain, chances = self.costs[0], self.survival.conditional(self._confidence)
        chances[:sure] = [1.0] * min(sure, len(chances))
        best, most, tokens, survives, j = 0, HYSTERESIS if self._last == 0 else 1.0, 1.0, 1.0, 0
        for width in self.widths:
            while j < width:
                survives *= chances[j]
                tokens += survives
                j += 1
            value = tokens * plain / self.costs[width] * (HYSTERESIS if width == self._last else 1.0)
            if value > most and self._risk(width) <= self.credit:
                best, most = width, value
        return best

    def learn(self, width: int, emitted: int, running: bool, ms: float, confidence: Sequence[float] | None) -> None:
        self.costs.learn(width, ms)
        believed, risk, sure = self._launched.popleft()
        if running:  # what ended the request may have cut the round
            self.survival.learn(believed, width, emitted - 1, sure)
        gained = emitted - ms / self.costs[0] if width else ALLOWANCE
        self.credit = min(self.credit + risk + gained, MOST_CREDIT)
        self._confidence = confidence if width or self.foresees else None
