"""The form of an answer on the command line, with the flags of llama.cpp; `--response-format` takes OpenAI's JSON."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from soloist.errors import UserError

FLAGS = {
    "json_schema": ("JSON", "write JSON that fits this schema; {} for any"),
    "json_schema_file": ("FILE", "the same from a file"),
    "regex": ("REGEX", "write a text that this expression matches as a whole"),
    "grammar": ("TEXT", "write a text of this grammar, in Lark or GBNF"),
    "grammar_file": ("FILE", "the same from a file"),
}


def add_shape_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("form of the answer, one of").add_mutually_exclusive_group()
    for name, (metavar, text) in FLAGS.items():
        group.add_argument("--" + name.replace("_", "-"), metavar=metavar, help=text)


def read_shape(args: argparse.Namespace) -> dict[str, Any] | None:
    """The response_format that the flags ask for, None without any.   Raises: UserError for what cannot be read."""
    given = next((name for name in FLAGS if getattr(args, name) is not None), None)
    if given is None:
        return None
    flag, text = "--" + given.replace("_", "-"), getattr(args, given)
    if hasattr(args, "response_format"):
        raise UserError(f"{flag} and --response-format both set the form of the answer; give one")
    if given.endswith("_file"):
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{flag} {getattr(args, given)}: cannot be read as text: {error}") from error
    kind = given.removesuffix("_file")
    if kind != "json_schema":
        return {"type": kind, kind: text}
    try:
        return {"type": "json_schema", "json_schema": {"schema": json.loads(text)}}
    except json.JSONDecodeError as error:
        raise UserError(f"{flag} is not JSON: {error}; give a schema such as {{\"type\": \"object\"}}") from error
