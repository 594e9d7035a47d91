"""Folders in Hugging Face layout: read exactly, and every fault found before any tensor is read."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from soloist.errors import UserError
from soloist.models.registry import load_decoder, read_config
from soloist.testing.checkpoints import write_checkpoint
from soloist.weights import shard
from soloist.weights.checkpoint import open_checkpoint

SHARD = "model-0000{}-of-00004.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "sharded", "llama", shards=4)


def fault(path: Path) -> str:
    """The one line that opening this path raises."""
    with pytest.raises(UserError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    return message


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def raw_shard(path: Path, header: object, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_shards_hold_the_same_tensors_as_one_file(tmp_path: Path, dtype: str) -> None:
    one = open_checkpoint(write_checkpoint(tmp_path / "one", "llama", dtype=dtype))
    many = open_checkpoint(write_checkpoint(tmp_path / "many", "llama", dtype=dtype, shards=4))
    expected = load_file(tmp_path / "one" / "model.safetensors")
    assert set(one.tensors) == set(many.tensors) == set(expected)
    for name, values in expected.items():
        for checkpoint in (one, many):
            found = checkpoint.read(name)
            assert found.dtype == values.dtype and torch.equal(found, values)
            assert checkpoint.tensors[name].shape == values.shape
            assert checkpoint.tensors[name].bytes == values.nbytes


def test_names_by_file_follow_the_files(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    grouped = checkpoint.names_by_file()
    assert len(grouped) == 4 and sorted(sum(grouped, [])) == sorted(checkpoint.tensors)
    for names in grouped:
        assert len({checkpoint.tensors[n].file for n in names}) == 1
        offsets = [checkpoint.tensors[n].offset for n in names]
        assert offsets == sorted(offsets)


def test_a_read_tensor_is_memory_of_its_own(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    first = checkpoint.read("model.norm.weight")
    kept = first.clone()
    checkpoint.read("model.norm.weight").zero_()
    checkpoint.close()
    shutil.rmtree(sharded)
    assert torch.equal(first, kept)


def test_empty_and_scalar_tensors_are_read(tmp_path: Path) -> None:
    stored = {"none": torch.empty(0, 3), "one": torch.tensor(2.5)}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert all(torch.equal(checkpoint.read(name), values) for name, values in stored.items())


def test_all_faults_of_all_shards_are_listed_before_any_tensor_is_read(
    sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sharded / SHARD.format(1)).unlink()
    cut(sharded / SHARD.format(2), (sharded / SHARD.format(2)).stat().st_size - 7)
    (sharded / SHARD.format(3)).write_bytes(b"")
    (sharded / SHARD.format(4)).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    monkeypatch.setattr(shard, "read_bytes", lambda info: pytest.fail("read a tensor"))
    message = fault(sharded)
    for number, reason in enumerate(("is missing", "is truncated", "is empty", "is a Git LFS pointer"), 1):
        assert f"{SHARD.format(number)} {reason}" in message


def test_an_undamaged_folder_raises_nothing(sharded: Path) -> None:
    """The control of the tests of faults."""
    assert open_checkpoint(sharded).tensors


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut in the length": (lambda p: cut(p, 5), "is truncated"),
    "cut in the header": (lambda p: cut(p, 40), "is truncated inside its header"),
    "cut in the data": (lambda p: cut(p, p.stat().st_size - 1), "is truncated"),
    "longer": (lambda p: p.write_bytes(p.read_bytes() + b"x"), "has 1 bytes after its last tensor"),
    "text": (lambda p: p.write_bytes(b"<html>not found</html>" * 99), "does not start like a safetensors file"),
    "no json": (lambda p: p.write_bytes(struct.pack("<Q", 4) + b"{{{{"), "has a damaged header"),
    "a list": (lambda p: raw_shard(p, [1]), "has a damaged header"),
    "no dtype": (lambda p: raw_shard(p, {"a": {"shape": [1]}}), "entry of a"),
    "negative": (
        lambda p: raw_shard(p, {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}),
        "numbers of a",
    ),
    "wrong size": (
        lambda p: raw_shard(p, {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)),
        "4 bytes for [2] of F32",
    ),
    "overlap": (
        lambda p: raw_shard(
            p,
            {
                "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                "b": {"dtype": "F32", "shape": [1], "data_offsets": [2, 6]},
            },
            bytes(6),
        ),
        "b overlaps",
    ),
    "hole": (
        lambda p: raw_shard(p, {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)),
        "a leaves a hole",
    ),
    "fp4": (
        lambda p: raw_shard(p, {"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"0"),
        "holds a as F4",
    ),
    "fp8": (
        lambda p: raw_shard(p, {"a": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}, b"0"),
        "holds a as F8_E4M3; readable are F64, F32, F16, BF16",
    ),
    "a name twice": (
        lambda p: p.write_bytes(
            struct.pack("<Q", 110) + (b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
                                      b'"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}').ljust(110)
        ),
        "holds a twice",
    ),
    "a folder": (lambda p: (p.unlink(), p.mkdir()), "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_with_its_damage(tmp_path: Path, damage: str) -> None:
    folder = write_checkpoint(tmp_path / "m", "llama")
    spoil, reason = DAMAGES[damage]
    spoil(folder / "model.safetensors")
    message = fault(folder)
    assert "model.safetensors" in message and reason in message


def test_tensors_that_the_index_places_elsewhere_are_named(sharded: Path) -> None:
    tensors = load_file(sharded / SHARD.format(2))
    moved = sorted(tensors)[0]
    save_file({n: t for n, t in tensors.items() if n != moved}, sharded / SHARD.format(2))
    assert f"{SHARD.format(2)} lacks {moved}" in fault(sharded)


def test_a_tensor_in_two_shards_is_an_error(sharded: Path) -> None:
    first, second = load_file(sharded / SHARD.format(1)), load_file(sharded / SHARD.format(2))
    twice = sorted(first)[0]
    save_file({**second, twice: first[twice]}, sharded / SHARD.format(2))
    assert f"holds {twice}, which {SHARD.format(1)} holds too" in fault(sharded)


def test_shards_that_the_index_does_not_know_are_an_error(sharded: Path) -> None:
    shutil.copy(sharded / SHARD.format(1), sharded / "model-00001-of-00009.safetensors")
    assert "model-00001-of-00009.safetensors is not in" in fault(sharded)


def test_shards_without_an_index_are_an_error(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert "4 safetensors files" in fault(sharded)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../b"}}'])
def test_a_broken_index_is_named(sharded: Path, index: str) -> None:
    (sharded / INDEX).write_text(index)
    with pytest.raises(UserError, match=re.escape(INDEX)):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"{", "is not valid JSON"),
        (b"[1]", "holds a list"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b"version https://git-lfs.github.com/spec/v1", "is a Git LFS pointer"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_settings_are_one_clear_line(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    folder = write_checkpoint(tmp_path / "m", "llama")
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=reason) as caught:
        open_checkpoint(folder)
    assert str(folder / name) in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_no_model_is_refused_with_what_is(tmp_path: Path) -> None:
    assert "no such file or folder" in fault(tmp_path / "nothing")
    assert "the folder is empty" in fault(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    assert "has no config.json (it has notes.txt)" in fault(tmp_path)
    assert "this file is neither" in fault(tmp_path / "notes.txt")
    (tmp_path / "x.gguf").write_bytes(b"")
    assert str(tmp_path / "x.gguf") in fault(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "no weights" in fault(tmp_path)
    assert "give its folder" in fault(tmp_path / "config.json")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "are pickled (pytorch_model.bin)" in fault(tmp_path)


def test_whole_numbers_are_refused_only_when_they_are_read(tmp_path: Path) -> None:
    save_file({"position_ids": torch.arange(3), "w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert torch.equal(checkpoint.read("w"), torch.ones(2))
    with pytest.raises(UserError, match="position_ids is stored as I64"):
        checkpoint.read("position_ids")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_refused_with_their_tensor(tmp_path: Path, value: float) -> None:
    folder = write_checkpoint(tmp_path / "m", "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match="tensor model.norm.weight holds NaN or infinite values"):
        load(folder)


def test_wrong_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", "llama")
    load(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.norm.weight": torch.ones(5)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"model.norm.weight is \[5\]"):
        load(folder)
    save_file({"new": torch.ones(1)} | tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match="unexpected new"):
        load(folder)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match="lacks model.norm.weight"):
        load(folder)


def load(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    load_decoder(checkpoint, read_config(checkpoint.config), torch.float32, torch.device("cpu"))
