"""The process of another rank than 0, as rank 0 starts it: it builds its share of the model and follows until the end."""

from __future__ import annotations

import sys
from typing import Any

from soloist.errors import RankLost, UserError
from soloist.llm import LLM


def follow(settings: dict[str, Any]) -> int:
    """Build the LLM that rank 0 builds, which serves and ends this process. Returns the exit code of one that failed;
    rank 0 has heard why and says so.
    """
    try:
        LLM(**settings)
    except (UserError, RankLost):
        return 1
    print("soloist: this process was started to follow, but is no rank", file=sys.stderr)
    return 1
