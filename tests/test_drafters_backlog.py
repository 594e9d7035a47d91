"""What a drafter leaves for later in plain rounds it makes up for to the last bit, and until then it costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from soloist.drafters import backlog as module
from soloist.drafters.backlog import Backlog, Seen
from soloist.drafters.drafter import Drafter
from soloist.models.decoder import Output
from soloist.runtime.engine import Engine
from tests import test_dspark_model as dspark
from tests import test_mtp as nextn
from tests.dspark_files import write_drafter
from tests.naive_dspark import Facts
from tests.speculate import PROMPT, Driven, proposal

PLAIN_ROUNDS = 21
"""More than one window."""


class AtOnce(Backlog):
    """Every row is seen by itself, in its own round."""

    def _can_wait(self, out: Output) -> bool:
        return False


class Leaky(Backlog):
    """Loses a row."""

    def passes(self) -> Iterator[Seen]:
        del self._rows[7:8]
        return super().passes()


class Kind:
    """How to build a drafter, and the engine and prompt for it."""

    def __init__(self, build: Callable[[], Drafter], served: Callable[[Drafter], Engine], prompt: tuple[int, ...]):
        self.build, self.served, self.prompt = build, served, prompt

    def driven(self, backlog: Backlog) -> tuple[Driven, list[torch.Tensor]]:
        """A drafter after many plain rounds, with its own caches."""
        drafter = self.build()
        vars(drafter)["_backlog"] = backlog
        found = Driven(self.served(drafter), nextn.params(), self.prompt)
        for _ in range(PLAIN_ROUNDS):
            found.round(0)
        return found, vars(drafter)["_caches"]

    def compared(self, backlog: Backlog) -> tuple[list[list[int]], list[bool]]:
        """The next proposals of one with this backlog and of one that saw every row at once; of every cache, whether
        the rows of all committed places are the same to the last bit.
        """
        (late, mine), (prompt, theirs) = self.driven(backlog), self.driven(AtOnce())
        proposals = [proposal(each.served, late.served.parts.drafter.width) for each in (late, prompt)]
        places = slice(0, len(late.text) - 1)  # all of the first page
        return proposals, [torch.equal(a[0, :, places], b[0, :, places]) for a, b in zip(mine, theirs, strict=True)]


@pytest.fixture(params=["mtp", "dspark"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    if request.param == "mtp":
        return Kind(lambda: nextn.mtp(nextn.WIDTH), nextn.served, nextn.PROMPT)
    write_drafter(tmp_path, Facts(), "deepspec", 6)
    return Kind(lambda: dspark.load(tmp_path), dspark.served, PROMPT)


def test_rows_seen_later_leave_the_bits_of_rows_seen_at_once(kind: Kind) -> None:
    (late, prompt), same = kind.compared(Backlog())
    assert late == prompt and all(same) and same


def test_rows_wait_with_the_tokens_behind_them(kind: Kind) -> None:
    backlog = Backlog()
    driven, _ = kind.driven(backlog)
    following = torch.cat([each for _, each, _ in backlog.passes()])
    assert following.tolist() == list(driven.text[-PLAIN_ROUNDS:])


def test_no_more_rows_wait_than_may(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", 5)
    backlog = Backlog()
    (late, prompt), same = kind.compared(backlog)
    assert late == prompt and all(same) and same
    kind.driven(backlog)
    assert sum(len(out.ids) for out, _, _ in backlog.passes()) == PLAIN_ROUNDS % 6


def test_negative_control_a_lost_row_is_seen_in_the_caches(kind: Kind) -> None:
    assert not all(kind.compared(Leaky())[1])


def test_a_plain_round_leaves_the_drafters_caches_alone_and_the_next_proposal_does_not(kind: Kind) -> None:
    driven, caches = kind.driven(Backlog())
    before = [cache.clone() for cache in caches]
    driven.round(0)
    assert all(map(torch.equal, caches, before))
    proposal(driven.served, 1)
    assert not any(map(torch.equal, caches, before))


def test_what_a_request_leaves_behind_is_forgotten_with_it(kind: Kind) -> None:
    backlog = Backlog()
    driven, caches = kind.driven(backlog)
    driven.served.parts.drafter.reset()
    assert not list(backlog.passes())
