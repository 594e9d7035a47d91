"""From parsed JSON or TOML to frozen dataclasses, strictly: what is unknown, missing or of another type is an error."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from soloist.errors import UserError

T = TypeVar("T")


def from_dict(kind: type[T], content: object, where: str) -> T:
    """Build a dataclass.   Raises: UserError that names the field by its path below `where`."""
    if not isinstance(content, Mapping):
        raise UserError(f"{where}: is {_called(content)}, but must be a table of {kind.__name__}")
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in content:
        if name not in fields:
            near = get_close_matches(str(name), fields, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(fields)}"
            raise UserError(f"{where}: unknown key {name!r}; {hint}")
    hints = typing.get_type_hints(kind)
    values = {}
    for name, field in fields.items():
        if name in content:
            values[name] = convert(hints[name], content[name], f"{where}: {name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UserError(f"{where}: {name} is missing")
    return kind(**values)


def convert(hint: Any, value: Any, where: str) -> Any:
    """`value` as what the annotation says.   Raises: UserError for another type."""
    if hint is Any:
        return value
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(inner, value, where)
    if origin is tuple:
        return _convert_tuple(inner, value, where)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise UserError(f"{where} is {_called(value)}, but must be a table")
        return {str(key): convert(inner[1], item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise UserError(f"{where} is {_called(value)}, but must be {_NAMES.get(hint, hint.__name__)}")
    return value


def _convert_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not types.NoneType)
    for kind in kinds[:-1]:
        if isinstance(kind, type) and isinstance(value, kind) and not isinstance(value, bool):
            return value
    return convert(kinds[-1], value, where)


def _convert_tuple(inner: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise UserError(f"{where} is {_called(value)}, but must be a list")
    if len(inner) == 2 and inner[1] is Ellipsis:
        return tuple(convert(inner[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if len(value) != len(inner):
        raise UserError(f"{where} has {len(value)} items, but must have {len(inner)}")
    return tuple(convert(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(inner, value, strict=True)))


_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _called(value: object) -> str:
    return "missing" if value is None else f"{value!r}"
