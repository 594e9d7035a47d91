"""The schema of a run's file as Markdown, from the dataclasses of `records.py`: docs/run-file.md, which a test compares."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any

from soloist.bench import files
from soloist.bench.records import READABLE, SCHEMA_VERSION, RunFile

HEAD = """# The file of a run

`soloist bench run` writes it; `soloist bench report`, `soloist bench compare` and `soloist.bench.files.read_run` read it, and
refuse a key that is unknown or missing. This is version {version} (`schema_version`); versions {readable} can be read. A key
that may be left out says what it then is. `null`, below also None, means "not known", never zero. Times ending in `_ms` are
milliseconds, in `_s` seconds, sizes ending in `_bytes` are bytes. What a metric means stands in
[measurement.md](measurement.md).
"""

NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false", types.NoneType: "null", Any: "anything"}


def schema_document() -> str:
    """The whole page."""
    parts = [HEAD.format(version=SCHEMA_VERSION, readable=" and ".join(map(str, READABLE)))]
    parts += [_section(kind) for kind in _kinds(RunFile, {})]
    parts += [f"## X.rounds.jsonl\n\n{inspect.cleandoc(str(files.__doc__))}\n"]
    return "\n".join(parts)


def _kinds(kind: type, seen: dict[type, None]) -> dict[type, None]:
    """The dataclass and all within it, in the order of their fields."""
    seen[kind] = None
    for hint in typing.get_type_hints(kind).values():
        for inner in (hint, *_within(hint)):
            if dataclasses.is_dataclass(inner) and inner not in seen:
                _kinds(typing.cast(type, inner), seen)
    return seen


def _within(hint: Any) -> Iterator[Any]:
    for inner in typing.get_args(hint):
        yield inner
        yield from _within(inner)


def _section(kind: type) -> str:
    hints = typing.get_type_hints(kind)
    rows = [f"| `{f.name}` | {_called(hints[f.name])} | {_default(f)} |" for f in dataclasses.fields(kind)]
    meaning = inspect.cleandoc(str(kind.__doc__))
    return "\n".join([f"## {kind.__name__}", "", meaning, "", "| key | holds | left out |", "|---|---|---|", *rows, ""])


def _called(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_called, inner))
    if origin is dict:
        return f"object of {_called(inner[1])}"
    if origin is tuple:
        return f"list of {_called(inner[0])}" if Ellipsis in inner else f"list of {len(inner)}: {', '.join(map(_called, inner))}"
    return NAMES[hint] if hint in NAMES else f"[{hint.__name__}](#{hint.__name__.lower()})"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return {None: "null", "": "empty"}.get(field.default, f"`{field.default}`".lower())
    return "" if field.default_factory is dataclasses.MISSING else "empty"
