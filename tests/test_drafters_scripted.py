"""The scripted drafter proposes its script, and a script that is none is refused with one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from soloist.config import SamplingParams
from soloist.drafters.scripted import ScriptedDrafter, read_script
from soloist.errors import UserError
from tests import speculate
from tests.speculate import V, engine, plain, run, tokens


def write(folder: Path, content: object) -> Path:
    path = folder / "script.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_at_output_index_i_the_script_from_i_on_is_proposed(tmp_path: Path) -> None:
    drafter = read_script(write(tmp_path, {"script": [5, 6, 7, 8, 9]}), V, 3)
    served = engine("llama", drafter)
    for emitted, expected in ((0, [5, 6, 7]), (2, [7, 8, 9]), (4, [9, 9, 9]), (30, [9, 9, 9])):
        served.parts.bufs.emitted.fill_(emitted)
        assert speculate.proposal(served, 3) == expected


def test_a_script_pins_the_acceptance() -> None:
    """Right for 3 of every 4 drafts: the wrong one ends each block, so every round emits four tokens."""
    asked = SamplingParams(temperature=0.0, max_tokens=41)
    answer = plain("llama", asked)
    script = [(token + 1) % V if index % 4 == 0 and index else token for index, token in enumerate(answer)]
    results = run(engine("llama", ScriptedDrafter(tuple(script), 6)), asked)
    assert tokens(results) == answer
    assert [len(result.tokens) for result in results[1:]] == [4] * 10


@pytest.mark.parametrize(
    "content, complaint",
    [
        ("{", "is not valid JSON"),
        ([1, 2], "must hold one object"),
        ({"script": [1], "more": 2}, "must hold one object"),
        ({"ids": [1]}, "must hold one object"),
        ({"script": 3}, "must hold one object"),
        ({"script": []}, "empty script"),
        ({"script": [1, V]}, rf"script\[1\] is {V}; ids are whole numbers from 0 to {V - 1}"),
        ({"script": [-1]}, r"script\[0\] is -1"),
        ({"script": [True]}, r"script\[0\] is True"),
        ({"script": [1.0]}, r"script\[0\] is 1.0"),
    ],
)
def test_what_is_no_script_is_refused(tmp_path: Path, content: object, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as caught:
        read_script(write(tmp_path, content), V, 3)
    assert "\n" not in str(caught.value)


def test_a_script_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be read \(No such file"):
        read_script(tmp_path / "none.json", V, 3)


def test_the_pinning_drafters_do_what_they_say() -> None:
    answer = list(range(20))
    served = engine("llama", speculate.DRAFTERS["oracle"](answer, 4))
    served.parts.bufs.emitted.fill_(3)
    proposals = {name: speculate.DRAFTERS[name](answer, 4) for name in ("oracle", "wrong", "mixed")}
    assert speculate.proposal(served, 4, proposals["oracle"]) == [3, 4, 5, 6]
    assert speculate.proposal(served, 4, proposals["wrong"]) == [4, 5, 6, 7]
    assert speculate.proposal(served, 4, proposals["mixed"]) == [3, 5, 6, 6]  # right at 3 and 6 by the pattern
    draws = torch.tensor([speculate.proposal(served, 15, speculate.DRAFTERS["random"](answer, 15)) for _ in range(2)])
    assert torch.equal(draws[0], draws[1]) and 5 < len(draws.unique())
    assert 0 <= int(draws.min()) and int(draws.max()) < V
