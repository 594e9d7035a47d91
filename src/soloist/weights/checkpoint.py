"""What a model is read from, whichever format it is stored in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from soloist.dist.share import Cut
from soloist.errors import UserError
from soloist.text.source import TokenizerSource

ACCEPTED = "a folder with config.json and *.safetensors, or a .gguf file"


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor. `dtype`: the stored type by its format's own name (BF16, Q4_1); `bytes`: its size there."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    bytes: int
    numel: int


class Checkpoint(Protocol):
    """An open checkpoint: names, shapes and settings at once, tensors one by one when they are asked for.

    Tensor names and `config` follow Hugging Face, so that a family reads every format by the same rules.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    tokenizer_source: TokenizerSource | None
    eos_token_ids: tuple[int, ...]

    def read(self, name: str, cuts: Sequence[Cut] = ()) -> torch.Tensor:
        """The tensor's values, or the part that `cuts` leave, in memory of its own and a floating dtype.

        Raises: UserError if there are none.
        """
        ...

    def names_by_file(self) -> list[list[str]]:
        """All tensor names, file by file, in the order in which they are stored."""
        ...

    def close(self) -> None:
        """Close the files. Tensors that were read stay valid."""
        ...


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a folder or a .gguf file.   Raises: UserError if it is neither, or if anything is missing or damaged."""
    if str(path).startswith("shapes:"):
        from soloist.weights.shapes import PREFIX, Shapes

        return Shapes(str(path).removeprefix(PREFIX))
    path = Path(path)
    if path.is_dir():
        from soloist.weights.safetensors_folder import SafetensorsFolder

        return SafetensorsFolder(path)
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; a model is {ACCEPTED}")
    if path.suffix.lower() == ".gguf":
        from soloist.weights.gguf_file import GgufFile

        return GgufFile(path)
    if path.name in ("config.json", "model.safetensors.index.json") or path.suffix == ".safetensors":
        raise UserError(f"{path}: is one file of a model; give its folder, {path.parent}")
    raise UserError(f"{path}: a model is {ACCEPTED}; this file is neither")


def cut(tensor: torch.Tensor, cuts: Sequence[Cut]) -> torch.Tensor:
    """The part of a whole tensor that the cuts leave, as a view."""
    for each in cuts:
        tensor = tensor.narrow(each.dim, each.start, each.size)
    return tensor


def in_stored_order(tensors: dict[str, TensorInfo]) -> list[list[str]]:
    """Names file by file, by offset: a disk is read once, from front to back."""
    by_file: dict[Path, list[TensorInfo]] = {}
    for info in tensors.values():
        by_file.setdefault(info.file, []).append(info)
    return [[i.name for i in sorted(infos, key=lambda i: i.offset)] for _, infos in sorted(by_file.items())]
