"""Files of drafters: what is read, and what is refused, by name and in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from soloist.config import EngineConfig
from soloist.drafters.dspark import build_dspark
from soloist.drafters.dspark_formats import read_draft_config
from soloist.drafters.registry import build_drafter
from soloist.errors import UserError
from soloist.testing.checkpoints import write_checkpoint
from soloist.weights.checkpoint import open_checkpoint
from tests import models
from tests.dspark_files import FORMATS, config_of, save, tensors_of, write_drafter
from tests.naive_dspark import Facts

DFLASH = Facts(markov=None, confidence=None, anchor_first=False, block=6)


FACTS = Facts()


def read(form: str, f: Facts = FACTS, **changes: Any) -> Any:
    config = {**config_of(f, form, 6), **changes}
    return read_draft_config(config, set(tensors_of(f)))


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_recognised(form: str) -> None:
    f = DFLASH if "dflash" in form else Facts()
    found = read(form, f)
    names = {"deepspec": "DeepSpec DSpark", "specforge": "SpecForge DSpark", "dflash": "DFlash",
             "speculators": "speculators dspark", "speculators-dflash": "speculators dflash"}  # fmt: skip
    assert found.format == names[form]
    assert (found.taps, found.anchor_first, found.num_drafts) == (f.taps, f.anchor_first, f.drafts)


def test_deepspecs_own_baseline_without_heads_is_anchor_first() -> None:
    assert read("deepspec", Facts(markov=None, confidence=None)).anchor_first


def test_the_outer_of_two_settings_counts() -> None:
    assert read("specforge", block_size=7).block_size == 7
    assert read("specforge", block_size=None).block_size == 5


@pytest.mark.parametrize("drafted, anchor_first", [(5, True), (4, False)])
def test_a_layout_that_is_not_named_follows_from_the_number_of_drafts(drafted: int, anchor_first: bool) -> None:
    methods = {"proposal_methods": [{"speculative_tokens": drafted}]}
    assert read("speculators", sample_from_anchor=None, speculators_config=methods).anchor_first == anchor_first


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "layout": ("speculators", {"sample_from_anchor": None, "speculators_config": {}}, "lacks sample_from_anchor"),
    "lost heads": ("deepspec", {"markov_rank": 0}, "holds a Markov head"),
    "head": ("deepspec", {"markov_head_type": "lstm"}, "supported are vanilla, gated, rnn"),
    "taps": ("deepspec", {"target_layer_ids": [3, 1]}, "must rise strictly"),
    "twice": ("deepspec", {"target_layer_ids": [1, 1]}, "must rise strictly"),
    "embedding": ("deepspec", {"target_layer_ids": [-1, 1]}, "the embedding cannot be read"),
    "no taps": ("deepspec", {"target_layer_ids": "1,3"}, "a list of layer numbers"),
    "block": ("deepspec", {"block_size": 1}, "block_size=1"),
    "unknown": ("deepspec", {"twist": 3}, "twist=3"),
    "bundle": ("deepspec", {"dspark_block_size": 5}, "DeepSeek-V4 bundle"),
    "domino": ("dflash", {"projector_type": "domino"}, "is Domino"),
    "dflash2": ("dflash", {"selector_rank": 4}, "is DFlash2"),
    "gemma": ("deepspec", {"architectures": ["Gemma4DSparkModel"]}, "made for Gemma"),
    "other": ("deepspec", {"architectures": ["Qwen3ForCausalLM"]}, "tells no format"),
    "eagle": ("speculators", {"speculators_model_type": "eagle3"}, "supported are 'dspark' and 'dflash'"),
    "rope": ("deepspec", {"rope_is_neox_style": False}, "interleaved rope"),
    "partial": ("deepspec", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "window": ("deepspec", {"layer_types": ["sliding_attention"] * 2}, "set the window"),
    "kind of layer": ("deepspec", {"layer_types": ["linear_attention"] * 2}, "full_attention or sliding_attention"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_we_do_not_run_is_refused_by_name(name: str) -> None:
    form, changes, complaint = REFUSED[name]
    with pytest.raises(UserError, match=complaint) as caught:
        read(form, DFLASH if form == "dflash" else Facts(), **changes)
    assert "\n" not in str(caught.value)


def test_a_model_is_no_drafter(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, "qwen3"))
    with pytest.raises(UserError, match="this is no drafter"):
        build_dspark(checkpoint, models.decoder("qwen3-deep"), 5)


def build(folder: Path, kind: str = "qwen3-deep") -> None:
    build_dspark(open_checkpoint(folder), models.decoder(kind), 5)


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_target_layers": 7}, "a model of 7 layers, this one has 6"),
    "last": ({"target_layer_ids": [1, 5]}, r"reads layers \[1, 5\] of the model, which has 6; readable are 0 to 4"),
    "mask": ({"mask_token_id": 101}, "mask_token_id=101; the vocabulary ends at 100"),
    "taps": ({"target_layer_ids": [0, 1, 3]}, r"fc.weight is \[64, 128\], config.json asks for \[64, 192\]"),
    "rank": ({"markov_rank": 9}, "markov_w1.weight is"),
    "confidence": ({"enable_confidence_head": False}, "unexpected confidence_head.proj.bias"),
    "memory": ({"confidence_head_with_markov": False}, "confidence_head.proj.weight is"),
    "kind": ({"markov_head_type": "gated"}, "lacks markov_head.gate_proj.bias"),
    "depth": ({"num_hidden_layers": 3, "layer_types": None}, "lacks layers.2"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_drafter_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    changes, complaint = MISFITS[name]
    write_drafter(tmp_path, Facts(), "deepspec", 6, **changes)
    with pytest.raises(UserError, match=complaint) as caught:
        build(tmp_path)
    assert str(caught.value).startswith(str(tmp_path)) and "\n" not in str(caught.value)


def test_a_drafter_of_another_model_is_refused(tmp_path: Path) -> None:
    write_drafter(tmp_path, Facts(), "deepspec", 6)
    with pytest.raises(UserError, match="hidden_size=64, the model 72: it was made for another model"):
        build(tmp_path, "llama")


@pytest.mark.parametrize("values", [[200] * 50, [0] * 49, [-i for i in range(50)]])
def test_a_vocabulary_map_that_leads_nowhere_is_refused(values: list[int], tmp_path: Path) -> None:
    f = Facts(draft_ids=tuple(range(50)))
    tensors = {**tensors_of(f), "d2t": torch.tensor(values)}
    save(tmp_path, config_of(f, "speculators", 6), tensors)
    with pytest.raises(UserError, match="d2t"):
        build(tmp_path)


@pytest.mark.parametrize(
    "values, complaint",
    [([1.0], "1 temperatures for a drafter of 5 places"), ([0.0] * 5, "numbers above 0"), ("warm", "numbers above 0"),
     ([True] * 5, "numbers above 0"), ([], "numbers above 0")],
)  # fmt: skip
def test_temperatures_that_do_not_fit_are_refused(values: object, complaint: str, tmp_path: Path) -> None:
    write_drafter(tmp_path, Facts(), "deepspec", 6)
    (tmp_path / "calibration.json").write_text(json.dumps({"temperatures": values}))
    with pytest.raises(UserError, match=complaint):
        build(tmp_path)


def test_a_folder_beside_the_model_or_a_path_is_found(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "ling-flash")
    write_drafter(tmp_path / "elsewhere", Facts(block=4), "specforge", 6)
    write_drafter(folder / "dspark", Facts(), "deepspec", 6)
    own = EngineConfig(str(folder), drafter="dspark")
    other = EngineConfig(str(folder), drafter="dspark", drafter_path=str(tmp_path / "elsewhere"), draft_width=3)
    widths = [
        build_drafter("dspark", config, open_checkpoint(folder), models.decoder("qwen3-deep")).width
        for config in (own, other)
    ]
    assert widths == [5, 3]
