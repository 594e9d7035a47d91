"""A folder in Hugging Face layout: config.json, safetensors in one file or in shards, and perhaps a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from soloist.dist.share import Cut
from soloist.errors import UserError
from soloist.text.source import union_eos
from soloist.weights.checkpoint import TensorInfo, in_stored_order
from soloist.weights.json_file import read_object, read_object_if_any
from soloist.weights.shard import READABLE, BadShard, read_header, read_tensor
from soloist.weights.tokenizer_files import folder_eos, folder_source

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
QUANTISED = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
"""Types whose values mean nothing without scales kept elsewhere."""


class SafetensorsFolder:
    """See Checkpoint. Every file is checked when the folder is opened, before any tensor is read.

    Raises: UserError listing all files that are missing, truncated or damaged, in one line.
    """

    def __init__(self, path: Path):
        self.path = path
        _check_is_model(path)
        self.config = read_object(path / "config.json")
        self.generation_config = read_object_if_any(path / "generation_config.json")
        self.tensors = _stored_tensors(path)
        self.tokenizer_source = folder_source(path)
        own = folder_eos(path, self.tokenizer_source)
        self.eos_token_ids = union_eos(self.config.get("eos_token_id"), self.generation_config.get("eos_token_id"), own)

    def read(self, name: str, cuts: Sequence[Cut] = ()) -> torch.Tensor:
        return read_tensor(self.tensors[name], cuts)

    def names_by_file(self) -> list[list[str]]:
        return in_stored_order(self.tensors)

    def close(self) -> None:
        """Nothing is held open between reads."""


def _check_is_model(path: Path) -> None:
    if (path / "config.json").is_file():
        return
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise UserError(f"{path}: the folder cannot be read ({error.strerror})") from error
    if not names:
        raise UserError(f"{path}: the folder is empty; a model folder holds config.json and *.safetensors")
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if ggufs:
        raise UserError(f"{path}: has no config.json, but GGUF files; give the file itself: {path / ggufs[0]}")
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    raise UserError(f"{path}: has no config.json (it has {shown}); a model folder holds it beside *.safetensors")


def _stored_tensors(path: Path) -> dict[str, TensorInfo]:
    """All tensors of the folder, from headers alone."""
    expected = _expected(path)
    tensors: dict[str, TensorInfo] = {}
    faults: list[str] = []
    for file, names in sorted(expected.items()):
        try:
            found = read_header(path / file)
        except BadShard as reason:
            faults.append(f"{file} {reason}")
            continue
        absent = sorted(set(names) - set(found))
        if absent:
            faults.append(f"{file} lacks {_some(absent)}, which {INDEX} places there")
        twice = sorted(set(found) & set(tensors))
        if twice:
            faults.append(f"{file} holds {_some(twice)}, which {tensors[twice[0]].file.name} holds too")
        quantised = sorted(name for name, info in found.items() if info.dtype in QUANTISED)
        if quantised:
            dtype = found[quantised[0]].dtype
            faults.append(f"{file} holds {_some(quantised)} as {dtype}; readable are {', '.join(READABLE)}")
        tensors.update(found)
    if faults:
        raise UserError(f"{path}: the weights cannot be used: {'; '.join(faults)}. Download or export them again")
    return tensors


def _expected(path: Path) -> dict[str, list[str]]:
    """File name -> tensors that the index places in it; the single file's are not known beforehand."""
    present = sorted(file.name for file in path.glob("*.safetensors"))
    if (path / INDEX).exists():
        expected = _indexed(path / INDEX)
        strays = [name for name in present if name not in expected and (SHARD.fullmatch(name) or name == SINGLE)]
        if strays:
            raise UserError(f"{path}: {_some(strays)} is not in {INDEX}; remove what belongs to another export")
        return expected
    if SINGLE in present or len(present) == 1:
        return {SINGLE if SINGLE in present else present[0]: []}
    if present:
        raise UserError(f"{path}: has {len(present)} safetensors files ({_some(present)}) but no {INDEX}; add it")
    others = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in path.glob(kind))
    if others:
        raise UserError(f"{path}: the weights are pickled ({_some(others)}); convert them to safetensors first")
    raise UserError(f"{path}: the folder has config.json but no weights; {SINGLE} is missing")


def _indexed(index: Path) -> dict[str, list[str]]:
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UserError(f"{index}: has no weight_map; download or export it again")
    expected: dict[str, list[str]] = {}
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise UserError(f"{index}: places {name} in {file!r}; the name of a file in the same folder is needed")
        expected.setdefault(file, []).append(name)
    return expected


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
