"""The tokenizer files of a folder: which template wins, which ids end a text, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from soloist.errors import UserError
from soloist.testing.checkpoints import write_checkpoint
from soloist.text.source import union_eos
from soloist.weights.checkpoint import Checkpoint, open_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m", "llama", tokenizer=True)


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def templates(checkpoint: Checkpoint) -> dict[str, str]:
    assert checkpoint.tokenizer_source is not None
    return dict(checkpoint.tokenizer_source.chat_templates)


def test_a_folder_without_tokenizer_json_has_no_source(tmp_path: Path) -> None:
    assert open_checkpoint(write_checkpoint(tmp_path / "m", "llama")).tokenizer_source is None


def test_special_tokens_are_text_however_they_are_written(folder: Path) -> None:
    change(folder / "tokenizer_config.json", bos_token={"content": "<|im_start|>", "lstrip": False}, unk_token=None)
    source = open_checkpoint(folder).tokenizer_source
    assert source is not None
    assert source.special_tokens["bos_token"] == "<|im_start|>"
    assert source.special_tokens["eos_token"] == "<|im_end|>"
    assert "unk_token" not in source.special_tokens
    assert source.json == (folder / "tokenizer.json").read_text()


def test_a_template_file_goes_before_the_settings(folder: Path) -> None:
    assert "im_start" in templates(open_checkpoint(folder))["default"]
    change(folder / "tokenizer_config.json", chat_template=[{"name": "default", "template": "a"},
                                                            {"name": "tool_use", "template": "b"}])  # fmt: skip
    assert templates(open_checkpoint(folder)) == {"default": "a", "tool_use": "b"}
    (folder / "chat_template.jinja").write_text("c")
    assert templates(open_checkpoint(folder)) == {"default": "c"}


def test_a_template_of_another_kind_is_refused(folder: Path) -> None:
    change(folder / "tokenizer_config.json", chat_template=7)
    with pytest.raises(UserError, match="chat_template"):
        open_checkpoint(folder)


def test_end_ids_of_all_files_are_united(folder: Path) -> None:
    own = open_checkpoint(folder).eos_token_ids
    assert own == (2,)
    change(folder / "config.json", eos_token_id=7)
    change(folder / "generation_config.json", eos_token_id=[9, 7, 8])
    assert open_checkpoint(folder).eos_token_ids == (7, 9, 8, 2)


def test_an_end_token_that_the_vocabulary_lacks_is_refused(folder: Path) -> None:
    change(folder / "tokenizer_config.json", eos_token="<nowhere>")
    with pytest.raises(UserError, match="lacks the eos_token '<nowhere>'"):
        open_checkpoint(folder)


@pytest.mark.parametrize("wrong", ["x", -1, True, [1, "2"], 1.0])
def test_end_ids_are_whole_numbers(wrong: Any) -> None:
    assert union_eos(None, 3, [3, 1], ()) == (3, 1)
    with pytest.raises(UserError, match="eos_token_id"):
        union_eos(wrong)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_tokenizer_files_are_named(folder: Path, name: str) -> None:
    (folder / name).write_text("{")
    with pytest.raises(UserError, match=f"{name}: is not valid JSON"):
        open_checkpoint(folder)
