"""Small JSON files, with one clear line for every way in which they can be unusable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from soloist.errors import UserError

LFS_POINTER = b"version https://git-lfs"
"""How a file begins that git-lfs has not fetched yet."""

DOWNLOAD = "download it again"
"""What to do about a broken file of a checkpoint."""

LFS_ADVICE = "is a Git LFS pointer, not the file itself; run `git lfs pull` in the folder"


def read_text(path: Path, advice: str = DOWNLOAD, name: str = "") -> str:
    """name: what an error calls the file, by default its path; advice: what to do about one whose content is wrong.

    Raises: UserError for what is not readable UTF-8, and for a Git LFS pointer.
    """
    name = name or str(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{name}: cannot be read ({error.strerror})") from error
    if data.startswith(LFS_POINTER):
        raise UserError(f"{name}: {LFS_ADVICE}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: is not UTF-8 text (byte {error.start}); {advice}") from error


def read_json(path: Path, advice: str = DOWNLOAD, name: str = "") -> Any:
    """What a file holds, arguments as in read_text.   Raises: UserError for what is not JSON."""
    text, name = read_text(path, advice, name), name or str(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{name}: is not valid JSON ({error.msg}, {place}); {advice}") from error
    except RecursionError as error:
        raise UserError(f"{name}: is nested too deeply; {advice}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint.   Raises: UserError for anything else."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds a {type(value).__name__} where a JSON object is needed")
    return value


def read_object_if_any(path: Path) -> dict[str, Any]:
    """Like read_object; empty if there is no such file."""
    return read_object(path) if path.exists() else {}
