"""Every rank runs the same rounds: rank 0 passes the request on, and after each round the word to go on.

No rank decides anything by itself. Tokens, acceptance and the end of a request follow from sums and picks that are equal
on all ranks. What only rank 0 can know goes along with the word: its clock, which the choice of the width listens to, and
that somebody ended the request. The word also carries the round's tokens, so ranks that came apart are noticed at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from soloist.dist.group import Group, Ranks
from soloist.drafters.width import FixedWidth, Told, WidthChoice
from soloist.errors import RankLost
from soloist.runtime.engine import Engine, Request
from soloist.runtime.runner import RoundResult

STOP = "stop"


def lead(group: Group, engine: Engine, task: dict[str, Any], request: Request) -> Iterator[RoundResult | None]:
    """Rank 0: `engine.run(request)`, on all ranks. task: what the others make the same request from.

    Raises: RankLost. After any error the group is closed.
    """
    over = False
    try:
        group.broadcast_object(task)
        for result in engine.run(request):
            group.check()
            over = result is not None and not result.running
            yield result
            if not over:
                group.broadcast_object([] if result is None else result.tokens)
    except GeneratorExit:
        if not over:
            group.broadcast_object(STOP)
        raise
    except BaseException as error:
        group.abandon(error)
        if group.lost is not None and isinstance(error, RuntimeError) and not isinstance(error, RankLost):
            raise RankLost(group.lost) from error
        raise


def follow(group: Group, engine: Engine, request: Request) -> None:
    """Another rank: run the request as long as rank 0 does.   Raises: RankLost if the ranks' texts differ."""
    rounds = engine.run(request)
    for result in rounds:
        if result is not None and not result.running:
            return
        word = group.broadcast_object()
        if word is None or word == STOP:
            return
        own = [] if result is None else result.tokens
        if word != own:
            raise RankLost(f"its round emitted {own}, rank 0's {word}; are all GPUs, or CPUs, of the same kind?")


def in_step(widths: WidthChoice, group: Group) -> WidthChoice:
    """The choice that all ranks make alike."""
    return widths if isinstance(widths, FixedWidth) or not isinstance(group, Ranks) else OneClock(widths, group)


class OneClock:
    """A choice of widths that hears rank 0's clock on every rank."""

    def __init__(self, choice: WidthChoice, group: Group):
        self._choice, self._group = choice, group
        self.adapts, self.candidates = choice.adapts, choice.candidates

    @property
    def plain_ms(self) -> float | None:
        return self._choice.plain_ms

    def begin(self, confidence: Sequence[float] | None) -> None:
        self._choice.begin(confidence)

    def choose(self, sure: int = 0) -> int:
        return self._choice.choose(sure)

    def tell(self) -> Told | None:
        return self._choice.tell()

    def learn(
        self, width: int, verified: int, emitted: int, running: bool, ms: float, confidence: Sequence[float] | None
    ) -> None:
        self._choice.learn(width, verified, emitted, running, self._group.broadcast_object(ms), confidence)
