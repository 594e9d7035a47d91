"""The process of another rank than 0, as rank 0 starts it: it builds its share of the model and follows until the end."""

from __future__ import annotations

import sys
from typing import Any

from soloist.dist.launch import open_group
from soloist.dist.place import rank_place
from soloist.errors import RankLost, UserError
from soloist.llm import LLM
from soloist.runtime.assemble import choose_device


def follow(settings: dict[str, Any]) -> int:
    """Build the LLM that rank 0 builds, which serves and ends this process; with the setting `meet` only meet the others.
    Returns the exit code of one that failed; rank 0 has heard why and says so.
    """
    try:
        if "meet" in settings:
            return _meet(settings["meet"])
        LLM(**settings)
    except (UserError, RankLost):
        return 1
    print("soloist: this process was started to follow, but is no rank", file=sys.stderr)
    return 1


def _meet(device: str) -> int:
    place = rank_place()
    assert place is not None
    group = open_group(place.size, None, choose_device(device, place.size), {})
    group.broadcast_object()
    group.close()
    return 0
