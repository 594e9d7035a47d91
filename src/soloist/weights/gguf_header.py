"""The head of a GGUF file: its metadata, and where every tensor lies.

Layout, little-endian: `GGUF`, u32 version, u64 tensors, u64 pairs; the pairs (key, type, value); for each tensor its
name, dimensions (fastest first), type and offset; then the data, aligned. Source: the format's description in the ggml
project. Read here, because the `gguf` library spends seconds on a vocabulary; it dequantises (see gguf_file).
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soloist.errors import UserError
from soloist.weights.checkpoint import TensorInfo
from soloist.weights.json_file import LFS_ADVICE, LFS_POINTER

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
VERSIONS = (2, 3)

TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
BLOCKS = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20),
    "Q5_0": (32, 22), "Q5_1": (32, 24), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip
"""The types we read: values and bytes of one block."""


@dataclass(frozen=True)
class GgufHeader:
    """`metadata`: key -> number, bool, str or list. Shapes are in the usual order, rows first."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> GgufHeader:
    """Raises: UserError for what is no GGUF file, is truncated, or has tensors of types we do not read (all listed)."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
            _check_start(path, start, size)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data, size)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def _check_start(path: Path, start: bytes, size: int) -> None:
    if size == 0:
        raise UserError(f"{path}: is empty (0 bytes); download it again")
    if start.startswith(LFS_POINTER):
        raise UserError(f"{path}: {LFS_ADVICE}")
    if start[:4] != b"GGUF":
        raise UserError(f"{path}: is not a GGUF file (it starts with {start[:4]!r})")
    if size < 24:
        raise UserError(f"{path}: is truncated inside its header ({size} bytes); download it again")
    (version,) = struct.unpack_from("<I", start, 4)
    if version not in VERSIONS:
        kind = "is big-endian" if struct.unpack_from(">I", start, 4)[0] in VERSIONS else f"has GGUF version {version}"
        raise UserError(f"{path}: {kind}; little-endian GGUF of version 2 or 3 is needed: convert the model again")


def _parse(path: Path, data: mmap.mmap, size: int) -> GgufHeader:
    cursor = _Cursor(data, size)
    try:
        num_tensors, num_pairs = cursor.numbers("QQ", at=8)
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = cursor.text()
            if key in metadata:
                raise UserError(f"{path}: has the metadata key {key} twice; convert the model again")
            metadata[key] = cursor.value(*cursor.numbers("I"))
        entries = [_entry(cursor) for _ in range(num_tensors)]
    except (_Damaged, struct.error, UnicodeDecodeError) as error:
        place = f"near byte {cursor.place:,}"
        raise UserError(f"{path}: the header is truncated or damaged {place}; download it again") from error
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise UserError(f"{path}: has general.alignment={alignment!r}; a positive number is needed")
    return GgufHeader(metadata, _tensors(path, entries, -(-cursor.place // alignment) * alignment, size))


Entry = tuple[str, tuple[int, ...], int, int]
"""Name, shape, type number and offset of a tensor."""


def _entry(cursor: _Cursor) -> Entry:
    name, (dims,) = cursor.text(), cursor.numbers("I")
    if dims > 8:
        raise _Damaged
    shape = cursor.numbers(f"{dims}Q")[::-1]
    return name, shape, *cursor.numbers("IQ")


def _tensors(path: Path, entries: list[Entry], start: int, size: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    faults = []
    end = 0
    for name, shape, number, offset in entries:
        dtype, numel = TYPE_NAMES.get(number, f"type {number}"), math.prod(shape)
        if name in tensors:
            faults.append(f"it holds {name} twice")
        if dtype not in BLOCKS:
            faults.append(f"{name} is stored as {dtype} (readable: {', '.join(BLOCKS)})")
            continue
        values, block_bytes = BLOCKS[dtype]
        if not shape or shape[-1] % values:
            faults.append(f"{name} has rows of {shape[-1] if shape else 0} values, not whole blocks of {dtype}")
            continue
        tensors[name] = TensorInfo(name, shape, dtype, path, start + offset, numel // values * block_bytes, numel)
        end = max(end, start + offset + tensors[name].bytes)
    if size < end:
        faults.append(f"it is truncated ({size:,} of {end:,} bytes)")
    if faults:
        raise UserError(f"{path}: the weights cannot be used: {'; '.join(faults)}")
    return tensors


class _Damaged(Exception):
    """The header says something impossible."""


class _Cursor:
    """Reads values one after another. Nothing is allocated that the file could not hold."""

    def __init__(self, data: mmap.mmap, size: int):
        self.data, self.size, self.place = data, size, 0

    def numbers(self, codes: str, at: int | None = None) -> tuple[Any, ...]:
        start = self.place if at is None else at
        found = struct.unpack_from("<" + codes, self.data, start)
        self.place = start + struct.calcsize("<" + codes)
        return found

    def text(self) -> str:
        (count,) = self.numbers("Q")
        start, self.place = self.place, self.place + count
        if self.place > self.size:
            raise _Damaged
        return self.data[start : self.place].decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self._array()
        if kind not in SCALARS:
            raise _Damaged
        (found,) = self.numbers(SCALARS[kind])
        return _shortest(found) if kind == 6 else found

    def _array(self) -> list[Any]:
        kind, count = self.numbers("IQ")
        if count > self.size - self.place:
            raise _Damaged
        if kind in SCALARS:
            return list(self.numbers(f"{count}{SCALARS[kind]}"))
        return [self.value(kind) for _ in range(count)]


def _shortest(value: float) -> float:
    """The shortest decimal that is stored as this fp32: 1e-05, as in config.json, not 9.999999747378752e-06."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value
