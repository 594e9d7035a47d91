"""tool_choice, strict tools and parallel_tool_calls: what a grammar can promise of an answer's calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from soloist.errors import UserError
from soloist.text.grammar import SPACING
from soloist.text.tools.calls import BEGIN, END
from soloist.text.tools.formats import ToolFormat
from soloist.text.tools.pairs import LING, QWEN, Tags
from soloist.text.tools.schemas import functions_of, kinds_of, parameters_of


def read_choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str:
    """`auto`, `none`, `required`, or the name of a tool as `=NAME`.   Raises: UserError for anything else."""
    names = functions_of(tools)
    if choice is None:
        return "auto" if names else "none"
    if isinstance(choice, str) and choice in ("none", "auto", "required"):
        if choice == "required" and not names:
            raise UserError("tool_choice='required', but there are no tools; give tools")
        return str(choice)
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    named = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(named, str) or named not in names:
        raise UserError(
            f"tool_choice={choice!r} must be none, auto, required, or {{'type': 'function', 'function': {{'name': NAME}}}} "
            f"with one of {', '.join(names) or 'the tools, and there are none'}"
        )
    return f"={named}"


def tool_grammar(
    format: ToolFormat, tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool = True
) -> dict[str, Any] | None:
    """The response_format that keeps what tool_choice, strict tools and parallel_tool_calls promise; None where nothing
    is promised. Calls have the tools' names, and their arguments fit the schemas; of texts between tags only the
    alternatives of `enum` are held to them.

    Args: choice: as `read_choice` gives it.
    """
    functions = functions_of(tools)
    if choice.startswith("="):
        functions = {choice[1:]: functions[choice[1:]]}
    strict = any(function.get("strict") for function in functions.values())
    if choice == "none" or (choice == "auto" and parallel and not strict):
        return None
    lines = ["text: /(.|\\n)+/", f"head[lazy]: /(.|\\n)*{_regex(BEGIN)}/"]
    if choice == "auto":
        start = "(head body)* text?" if parallel else "text | head body"
    else:
        first = json.dumps(BEGIN)
        start = f"{first} body" + ("" if choice.startswith("=") or not parallel else f' ("\\n"? {first} body)*')
    lines.append(f"start: {start}")
    lines.append("body: " + " | ".join(f"body_{i}" for i in range(len(functions))))
    for i, (name, function) in enumerate(functions.items()):
        parameters = parameters_of(function)
        if format is ToolFormat.HERMES:
            opening = f'\n{{"name": {json.dumps(name)}, "arguments": '
            lines.append(f"body_{i}: {json.dumps(opening)} {_json(parameters)} {json.dumps('}' + chr(10) + END)}")
        else:
            lines += _pairs(LING if format is ToolFormat.LING else QWEN, i, name, parameters)
    return {"type": "grammar", "grammar": "\n".join(lines)}


def _pairs(tags: Tags, i: int, name: str, parameters: Mapping[str, Any]) -> list[str]:
    """Rules of one tool: its parameters in the schema's order, those that are not required left out or not."""
    properties, required = parameters.get("properties") or {}, parameters.get("required") or ()
    lines, parts = [], list[str]()
    for j, (key, schema) in enumerate(properties.items()):
        pair = f"pair_{i}_{j}"
        parts.append(pair if key in required else f"{pair}?")
        lines += _pair(tags, pair, key, schema, parameters)
    if tags.lines:
        before, after = json.dumps(f"\n{tags.name}{name}>\n"), json.dumps(f"{tags.last}\n{END}")
    else:
        before, after = f'{json.dumps(name)} "\\n"?', json.dumps(END)
    return [f"body_{i}: {before} {' '.join(parts)} {after}", *lines]


def _pair(tags: Tags, rule: str, key: str, schema: Any, root: Mapping[str, Any]) -> list[str]:
    end, lines = json.dumps(tags.value_end), list[str]()
    kinds, values = kinds_of(schema, root), schema.get("enum") if isinstance(schema, Mapping) else None
    if kinds == {"string"} and values:
        value = "(" + " | ".join(json.dumps(str(one), ensure_ascii=False) for one in values) + ")"
    elif kinds and "string" not in kinds:
        value = _json({**schema, **{name: root[name] for name in ("$defs", "definitions") if name in root}})
    else:
        lines.append(f"{rule}_value[lazy]: /(.|\\n)*{_regex(tags.value_end)}/")
        value, end = f"{rule}_value", ""
    if tags.lines:
        value = value if not end else f'{value} "\\n"'
        before = json.dumps(f"{tags.key}{key}{tags.key_end}\n", ensure_ascii=False)
    else:
        before = f"{json.dumps(tags.key + key + tags.key_end, ensure_ascii=False)} \"\\n\"? {json.dumps(tags.value)}"
    return [f'{rule}: {before} {value} {end} "\\n"?', *lines]


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({"x-guidance": SPACING, **schema})


def _regex(tag: str) -> str:
    return tag.replace("/", "\\/")
