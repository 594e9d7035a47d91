"""One safetensors file: the header checked against the file's size, and tensors read from it one by one.

Layout: 8 bytes little-endian length N, N bytes JSON `{name: {dtype, shape, data_offsets}}`, then the data.
Source: the format's description in the safetensors project. Read here, not through its library, because a mapped file
counts as resident memory beside the model; one tensor read into memory of its own does not, and can be freed.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from soloist.dist.share import Cut
from soloist.errors import UserError
from soloist.weights.checkpoint import TensorInfo, cut
from soloist.weights.json_file import LFS_ADVICE, LFS_POINTER

READABLE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip

CHUNK_BYTES = 1 << 26
"""Bytes of rows read at once where only some columns are wanted."""

MOST_HEADER_BYTES = 100_000_000
"""The format's own limit."""


class BadShard(Exception):
    """Why a file cannot be used, worded to follow its name."""


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a file whose every byte is accounted for.   Raises: BadShard."""
    if not path.exists():
        raise BadShard("is missing")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
            header_bytes = _header_bytes(start, size)
            file.seek(8)
            header = file.read(header_bytes)
    except OSError as error:
        raise BadShard(f"cannot be read ({error.strerror})") from error
    tensors = {n: _info(n, entry, path, 8 + header_bytes) for n, entry in _entries(header).items()}
    _check_layout(tensors, 8 + header_bytes, size)
    return tensors


def read_tensor(info: TensorInfo, cuts: Sequence[Cut] = ()) -> torch.Tensor:
    """Values of one tensor, or of the part that `cuts` leave, in new memory.

    Rows are read alone. Columns lie in every page of the file, so their rows are read whole, some at a time, and cut.
    Raises: UserError for a dtype that holds no plain numbers.
    """
    dtype = READABLE.get(info.dtype)
    if dtype is None:
        readable = ", ".join(READABLE)
        raise UserError(f"{info.file}: tensor {info.name} is stored as {info.dtype}; readable are {readable}")
    if not cuts:
        return read_bytes(info).view(dtype).view(info.shape)
    rows = next((each for each in cuts if each.dim == 0), Cut(0, 0, info.shape[0], info.shape[0]))
    inner = [each for each in cuts if each.dim]
    row_bytes = info.bytes // info.shape[0]
    step = max(1, CHUNK_BYTES // row_bytes) if inner else rows.size
    parts = []
    for start in range(rows.start, rows.start + rows.size, step):
        count = min(step, rows.start + rows.size - start)
        part = read_bytes(info, start * row_bytes, count * row_bytes).view(dtype).view(count, *info.shape[1:])
        parts.append(cut(part, inner).clone() if inner else part)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def read_bytes(info: TensorInfo, start: int = 0, size: int | None = None) -> torch.Tensor:
    """The stored bytes of one tensor, or `size` of them from `start` on, [bytes] uint8 in new memory."""
    size = info.bytes if size is None else size
    values = torch.empty(size, dtype=torch.uint8)
    target, done = values.numpy().data, 0
    with info.file.open("rb", buffering=0) as file:
        file.seek(info.offset + start)
        while done < size:  # the system hands over 2 GiB at most in one go
            count = file.readinto(target[done:])
            if not count:
                raise UserError(f"{info.file}: ended inside tensor {info.name}; the file changed while it was read")
            done += count
    return values


def _header_bytes(start: bytes, size: int) -> int:
    if size == 0:
        raise BadShard("is empty (0 bytes)")
    if start.startswith(LFS_POINTER):
        raise BadShard(LFS_ADVICE)
    if size < 8:
        raise BadShard(f"is truncated ({size} bytes)")
    (count,) = struct.unpack("<Q", start[:8])
    if count > MOST_HEADER_BYTES:
        raise BadShard("has a damaged header (it does not start like a safetensors file)")
    if 8 + count > size:
        raise BadShard(f"is truncated inside its header ({size:,} bytes, the header alone has {8 + count:,})")
    return int(count)


def _entries(header: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise BadShard(f"holds {next(n for n in names if names.count(n) > 1)} twice")
        return found

    try:
        entries = json.loads(header.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise BadShard("has a damaged header (no valid JSON)") from error
    if not isinstance(entries, dict):
        raise BadShard("has a damaged header (no JSON object)")
    entries.pop("__metadata__", None)
    return entries


def _info(name: str, entry: Any, path: Path, data_start: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise BadShard(f"has a damaged header (entry of {name})") from error
    if not all(type(x) is int and x >= 0 for x in (*shape, begin, end)):
        raise BadShard(f"has a damaged header (numbers of {name})")
    numel = math.prod(shape)
    if dtype not in ITEM_BYTES:
        raise BadShard(f"holds {name} as {dtype}; readable are {', '.join(READABLE)}")
    if end - begin != numel * ITEM_BYTES[dtype]:
        raise BadShard(f"has a damaged header ({name}: {end - begin:,} bytes for {list(shape)} of {dtype})")
    return TensorInfo(name, shape, dtype, path, data_start + begin, end - begin, numel)


def _check_layout(tensors: dict[str, TensorInfo], data_start: int, size: int) -> None:
    """The tensors follow each other without overlap or hole, and end with the file."""
    place = data_start
    for info in sorted(tensors.values(), key=lambda i: (i.offset, i.bytes)):
        if info.offset != place:
            fault = "overlaps" if info.offset < place else "leaves a hole"
            raise BadShard(f"has a damaged header ({info.name} {fault})")
        place += info.bytes
    if size < place:
        raise BadShard(f"is truncated ({size:,} of {place:,} bytes)")
    if size > place:
        raise BadShard(f"has {size - place:,} bytes after its last tensor; it is damaged or not a safetensors file")
