"""How many tokens to draft: the width that promises most tokens a millisecond, judged by older rounds only.

The host decides how many are drafted, knowing the rounds it has read. How many of these are verified the device decides
itself, in the round and from the confidences of its own drafts (ops/choose_width.py), by what the host tells it of costs and
experience. With acceptance by equality no width changes the text, so the choice may look at anything and only costs or
saves time.
A credit, in plain rounds, bounds what it can cost: a drafted round must be affordable even if all its drafts are
rejected, wins fill the credit, and plain rounds add a hundredth. What a request won the next one may not lose, but for one
plain round. So of any requests in a row all together are never slower than plain by more than that hundredth and that
round, however wrong the estimates are and however short the answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from operator import mul, truediv
from statistics import median
from typing import Protocol

WIDTHS = (1, 2, 3, 5, 7, 11, 15)
"""Widths that `auto` chooses from: few, so that the cost of each is soon known."""

START_CREDIT, MOST_CREDIT, ALLOWANCE = 1.0, 16.0, 0.01
"""Plain rounds: of a new engine and at most at the start of a request, at most within one, and gained by every plain round."""

HYSTERESIS = 1.03
"""By how much another width must look better than the last one."""

TELL_EVERY = 8
"""Rounds after which the device is told anew."""


Told = tuple[list[float], list[float], float]
"""costs, factors, saved: see `choose_width`."""


class WidthChoice(Protocol):
    """Told of every round in order; asked for the width of the next, perhaps before it heard of the last.

    adapts: whether a round may verify fewer tokens than it drafts. candidates: all widths that may be chosen.
    """

    adapts: bool
    candidates: Sequence[int]

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

    def tell(self) -> Told | None:
        """What the device needs to know for that round; None where what it was told last will do."""
        ...

    def learn(
        self, width: int, verified: int, emitted: int, running: bool, ms: float, confidence: Sequence[float] | None
    ) -> None:
        """What the oldest round not yet heard of brought, of how many drafts and how many of them verified, how long it
        took, and the drafter's confidence after it.
        """
        ...


class FixedWidth:
    """Always the same width."""

    adapts = False
    plain_ms: float | None = None

    def __init__(self, width: int):
        self.width = width
        self.candidates: Sequence[int] = (width,)

    def begin(self, confidence: Sequence[float] | None) -> None:
        pass

    def choose(self, sure: int = 0) -> int:
        return self.width

    def tell(self) -> Told | None:
        return None

    def learn(
        self, width: int, verified: int, emitted: int, running: bool, ms: float, confidence: Sequence[float] | None
    ) -> None:
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

    def table(self, most: int) -> list[float]:
        """Of all widths up to `most`; a wider one costs no less."""
        return list(accumulate((self[width] for width in range(most + 1)), max))

    def at_most(self, width: int) -> float:
        """A window costs at most as much more as it has more rows, and no more than a wider one."""
        below = max(w for w in self._medians if w <= width)
        wider = [ms for w, ms in self._medians.items() if w > width]
        return min([self._medians[below] * (width + 1) / (below + 1), *wider])


class Savings:
    """What share of the time between a wide round and a narrow one is saved if the wide one verifies only as much as the
    narrow one: 1 where its other rows cost nothing, 0 where they cost as much as ever. START until it was measured.
    """

    START, SAMPLES = 0.5, 15

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=self.SAMPLES)
        self.share = self.START

    def learn(self, wide_ms: float, narrow_ms: float, ms: float) -> None:
        """A round that drafted as the wide one and verified as the narrow one took `ms`."""
        if wide_ms > narrow_ms:
            self._samples.append(min(1.0, max(0.0, (wide_ms - ms) / (wide_ms - narrow_ms))))
            self.share = median(self._samples)


class Survival:
    """Chance that a draft is accepted given that those before it were: what the drafter says, corrected by experience.

    At every place the drafter's confidence (PRIOR where it has none) is multiplied by accepted / expected there.
    STRENGTH expected ones count as having gone as at the place before. Trials fade over MEMORY rounds, so that what was
    given up is tried again.
    """

    PRIOR, MEMORY, STRENGTH = 0.8, 64, 2.0

    def __init__(self, most: int):
        self._hits, self._expected = [0.0] * most, [0.0] * most

    def factors(self) -> list[float]:
        """By which what the drafter says of each place is to be multiplied."""
        factors, factor = [], 1.0
        for hits, expected in zip(self._hits, self._expected, strict=True):
            factor = (hits + self.STRENGTH * factor) / (expected + self.STRENGTH)
            factors.append(factor)
        return factors

    def conditional(self, confidence: Sequence[float] | None) -> list[float]:
        """The corrected chance of every draft."""
        said = [self.PRIOR] * len(self._hits) if confidence is None else confidence
        return [min(1.0, chance * factor) for chance, factor in zip(said, self.factors(), strict=True)]

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

    most: the drafter's width. foresees: see Drafter; where it does not, the coming proposal is taken for one like the last
    LIKE, of which every plain round forgets one. Each would be verified as far as it is worth it. refresh: rounds after
    which a plain round is due, to know what drafting is worth, and one of each width that verifies all its drafts, to know
    what that costs.
    """

    adapts, LIKE = True, 16

    def __init__(self, most: int, foresees: bool = False, refresh: int = 64):
        self.widths = [w for w in WIDTHS if w < most] + [most]
        self.candidates: Sequence[int] = (0, *self.widths)
        self.costs, self.survival, self.savings = RoundCosts(), Survival(most), Savings()
        self.credit, self.foresees, self.refresh = START_CREDIT, foresees, refresh
        self._confidence: Sequence[float] | None = None
        self._forecasts: deque[list[float]] = deque(maxlen=self.LIKE)
        self._trims = False
        self._launched: deque[tuple[float, int]] = deque()  # credit set aside, sure drafts
        self._last, self._since_plain = 0, 0
        self._since_whole = dict.fromkeys(self.widths, refresh)
        self._since_told = 0

    @property
    def plain_ms(self) -> float | None:
        return self.costs.measured(0)

    def begin(self, confidence: Sequence[float] | None) -> None:
        self.credit = min(self.credit, START_CREDIT)
        self.survival = Survival(self.widths[-1])
        self._trims = confidence is not None
        self._confidence = confidence if self.foresees else None
        self._forecasts.clear()
        self._launched.clear()
        self._last, self._since_told = 0, TELL_EVERY

    def choose(self, sure: int = 0) -> int:
        stale = self.plain_ms is None or self._since_plain >= self.refresh
        self._last = 0 if stale else self._best(sure)
        self._since_plain = self._since_plain + 1 if self._last else 0
        risk = self._risk(self._last) if self._last else 0.0
        self.credit -= risk
        self._launched.append((risk, sure))
        return self._last

    def _risk(self, width: int) -> float:
        """Plain rounds lost if all drafts are rejected."""
        return self.costs.at_most(width) / self.costs[0] - 1

    def _best(self, sure: int) -> int:
        forecasts = (not sure and self._forecasts) or [self._tokens(self._confidence, sure)]
        most = HYSTERESIS if self._last == 0 else 1.0
        needed = most / HYSTERESIS * len(forecasts)  # no round is cheaper than a plain one
        widths = [w for w in self.widths if sum(t[w] for t in forecasts) > needed and self._risk(w) <= self.credit]
        if not widths:
            return 0  # at once: that plain decoding costs no more than without a drafter hangs on this
        costs, saved, best = self.costs.table(widths[-1]), self.savings.share if self._trims else 0.0, 0
        for width in widths:
            spent = [costs[width] - saved * (costs[width] - costs[w]) for w in range(width + 1)]
            rates = [max(map(truediv, tokens, spent)) for tokens in forecasts]
            value = costs[0] * sum(rates) / len(rates) * (HYSTERESIS if width == self._last else 1.0)
            if value > most:
                best, most = width, value
        return best

    def _tokens(self, confidence: Sequence[float] | None, sure: int = 0) -> list[float]:
        """Expected tokens of a round for every width, whose first `sure` drafts are certain."""
        chances = self.survival.conditional(confidence)
        chances[:sure] = [1.0] * min(sure, len(chances))
        return list(accumulate(accumulate(chances, mul), initial=1.0))

    def tell(self) -> Told | None:
        """Every so often; and for a round that is to verify all, and after it."""
        if not self._trims or not self._last:
            return None
        whole = self._since_whole[self._last] >= self.refresh
        self._since_whole[self._last] = 0 if whole else self._since_whole[self._last] + 1
        self._since_told += 1
        if self._since_told < TELL_EVERY and not whole:
            return None
        self._since_told = TELL_EVERY if whole else 0
        costs = self.costs.table(self.widths[-1])
        return costs, self.survival.factors(), 0.0 if whole else self.savings.share

    def learn(
        self, width: int, verified: int, emitted: int, running: bool, ms: float, confidence: Sequence[float] | None
    ) -> None:
        if verified == width:
            self.costs.learn(width, ms)
        elif self.costs.measured(width) is not None:
            self.savings.learn(self.costs[width], self.costs[verified], ms)
        risk, sure = self._launched.popleft()
        if running:  # what ended the request may have cut the round
            self.survival.learn(self._confidence if self.foresees else confidence, verified, emitted - 1, sure)
        gained = emitted - ms / self.costs[0] if width else ALLOWANCE
        self.credit = min(self.credit + risk + gained, MOST_CREDIT)
        if self.foresees:
            self._confidence = confidence
        elif width and confidence is not None:
            self._forecasts.append(self._tokens(confidence))
        elif self._forecasts:
            self._forecasts.popleft()
