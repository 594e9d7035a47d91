"""Which process of a group this one is: the variables that torchrun sets, and that rank 0 sets for the ranks it starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RankPlace:
    """Which process of a group this is. local_rank: its number on its machine; leader: where rank 0 listens, as
    host:port:token, if it started this process; master: rank 0's address, from torchrun.
    """

    rank: int
    size: int
    local_rank: int
    leader: str | None = None
    master: str = "127.0.0.1"


def rank_place() -> RankPlace | None:
    """From the variables that torchrun, or our rank 0, sets for every process; None without them."""
    found = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    if not all(value.isdigit() for value in found):
        return None
    rank, size, local = map(int, found)
    return RankPlace(rank, size, local, os.environ.get("SOLOIST_LEADER"), os.environ.get("MASTER_ADDR", "127.0.0.1"))


def is_follower(size: int) -> bool:
    """Whether this process was started as another rank than 0 of a model of `size` ranks."""
    place = rank_place()
    return size > 1 and place is not None and place.rank > 0


def child_environment(place: RankPlace) -> dict[str, str]:
    """Our environment, for a process that takes that place and finds this package where we found it."""
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    ours = {"RANK": place.rank, "WORLD_SIZE": place.size, "LOCAL_RANK": place.local_rank, "SOLOIST_LEADER": place.leader}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)} | {name: str(value) for name, value in ours.items()}
