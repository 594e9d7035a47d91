"""Small JSON files of a checkpoint, with one clear line for every way in which they can be unusable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from soloist.errors import UserError

LFS_POINTER = b"version https://git-lfs"
"""How a file begins that git-lfs has not fetched yet."""

LFS_ADVICE = "is a Git LFS pointer, not the file itself; run `git lfs pull` in the folder"


def read_text(path: Path) -> str:
    """Raises: UserError for what is not readable UTF-8, and for a Git LFS pointer."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    if data.startswith(LFS_POINTER):
        raise UserError(f"{path}: {LFS_ADVICE}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text (byte {error.start}); download it again") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.   Raises: UserError for anything else."""
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{path}: is not valid JSON ({error.msg}, {place}); download it again") from error
    except RecursionError as error:
        raise UserError(f"{path}: is nested too deeply to be a model's settings; download it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a {type(value).__name__} where a JSON object is needed")
    return value


def read_object_if_any(path: Path) -> dict[str, Any]:
    """Like read_object; empty if there is no such file."""
    return read_object(path) if path.exists() else {}
