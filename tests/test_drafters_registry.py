"""Which drafter runs is what was asked for, or the best there is; what cannot be had is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soloist.config import EngineConfig
from soloist.drafters.width import AutoWidth, FixedWidth
from soloist.errors import UserError
from soloist.runtime.assemble import Assembled, assemble
from soloist.testing.checkpoints import write_checkpoint
from soloist.weights.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")
    (path / "script.json").write_text(json.dumps({"script": [1, 2, 3]}))
    return path


def built(folder: Path, **settings: Any) -> Assembled:
    return assemble(EngineConfig(str(folder), **settings), open_checkpoint(folder))


@pytest.mark.parametrize(
    "settings, drafter, width, choice, kind",
    [
        ({}, "none", 0, "fixed", FixedWidth),
        ({"drafter": "ngram"}, "ngram", 15, "auto", AutoWidth),
        ({"drafter": "auto"}, "ngram", 15, "auto", AutoWidth),
        ({"drafter": "auto", "draft_width": 3}, "ngram", 3, "fixed", FixedWidth),
        ({"drafter": "ngram", "acceptance": "rejection"}, "ngram", 4, "fixed", FixedWidth),
        ({"drafter": "ngram", "acceptance": "rejection", "draft_width": 9}, "ngram", 9, "fixed", FixedWidth),
        ({"drafter": "scripted", "drafter_path": "script.json"}, "scripted", 15, "auto", AutoWidth),
        ({"drafter": "auto", "drafter_path": "script.json", "draft_width": 1}, "scripted", 1, "fixed", FixedWidth),
    ],
)
def test_the_plan_says_which_drafter_runs_and_how_wide(
    folder: Path, settings: dict[str, Any], drafter: str, width: int, choice: str, kind: type
) -> None:
    if "drafter_path" in settings:
        settings = {**settings, "drafter_path": str(folder / settings["drafter_path"])}
    made = built(folder, **settings)
    plan = made.plan
    assert (plan.drafter, plan.draft_width, plan.width_choice, plan.window) == (drafter, width, choice, width + 1)
    assert plan.acceptance == settings.get("acceptance", "equality")
    assert isinstance(made.engine.widths, kind) and made.engine.parts.drafter.name == drafter


@pytest.mark.parametrize(
    "settings, complaint",
    [
        ({"drafter": "eagle"}, "drafter='eagle' is not one of none, ngram, mtp, dspark, scripted, auto"),
        ({"drafter": "mtp"}, "has no MTP layer; use drafter=ngram or drafter=auto"),
        ({"drafter": "dspark"}, "brings no DSpark drafter along; give its folder as drafter_path"),
        ({"drafter": "scripted"}, "drafter=scripted needs drafter_path"),
        ({"drafter": "scripted", "drafter_path": "/no/such.json"}, "cannot be read"),
        ({"drafter": "ngram", "drafter_path": "x"}, "drafter_path='x' is not read by drafter=ngram"),
        ({"drafter": "ngram", "draft_width": 16}, "draft_width=16 must be a whole number from 1 to 15"),
        ({"drafter": "ngram", "draft_width": 0}, "draft_width=0 must be a whole number from 1 to 15"),
        ({"drafter": "ngram", "draft_width": "many"}, "draft_width='many' must be auto or a whole number"),
        ({"draft_width": 4}, "drafter=none drafts nothing; choose a drafter"),
    ],
)
def test_what_cannot_be_had_is_refused_in_one_line(folder: Path, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        built(folder, **settings)
    assert complaint in str(caught.value) and "\n" not in str(caught.value)
