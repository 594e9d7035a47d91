"""The form of an answer, asked for on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soloist.cli import main

ASK = ["generate", "Some JSON:", "--context-length", "256", "-n", "40"]
SCHEMA = '{"enum": ["red", "green"]}'


@pytest.mark.parametrize("from_file", [False, True])
def test_a_schema_is_kept_from_the_line_or_from_a_file(
    from_file: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "schema.json"
    file.write_text(SCHEMA)
    assert main([*ASK, *(["--json-schema-file", str(file)] if from_file else ["--json-schema", SCHEMA])]) == 0
    assert json.loads(capsys.readouterr().out) in ("red", "green")


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--json-schema", "{"], "--json-schema is not JSON"),
        (["--grammar-file", "/nowhere/g.lark"], "--grammar-file"),
        (["--regex", "a", "--response-format", '{"type": "text"}'], "--response-format"),
        (["--regex", "a", "--grammar", "b"], "not allowed with"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_code_2(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ASK, *flags]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
