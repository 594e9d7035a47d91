"""What the tools of a request say of their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soloist.errors import UserError

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def functions_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Name -> function, of tools in OpenAI's form.   Raises: UserError naming the tool that is not of it."""
    found: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise UserError(f"tools[{i}] must be {{'type': 'function', 'function': {{'name': ..., 'parameters': ...}}}}")
        if not isinstance(function.get("parameters") or {}, Mapping):
            raise UserError(f"tools[{i}].function.parameters must be a JSON schema, an object")
        found[function["name"]] = function
    return found


def parameters_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's arguments."""
    return function.get("parameters") or NO_PARAMETERS


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 8) -> frozenset[str]:
    """JSON types that a schema lets through; empty if it does not say. References are followed within `root`."""
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    if isinstance(schema.get("$ref"), str):
        return kinds_of(_referred(schema["$ref"], root), root, depth - 1)
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset([kind])
    if isinstance(kind, list):
        return frozenset(map(str, kind))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            parts = [kinds_of(part, root, depth - 1) for part in schema[key]]
            return frozenset().union(*parts) if all(parts) else frozenset()
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return frozenset(["string"])
    return frozenset()


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found
