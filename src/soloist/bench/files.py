"""The files of a run: X.json, see `records.py`, and X.rounds.jsonl, which grows while the run lasts.

When a request ends, X.rounds.jsonl gets a line for each of its blocks, `{"request": number, ...fields of Block}`, and then
one for itself, `{"request": number, "record": {...fields of RequestRecord without blocks}}`. X.json is written less often.
So a process that is killed loses the request in flight and nothing else: what X.json has not got is read from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO

from soloist.bench.conclude import conclude
from soloist.bench.decode import from_dict
from soloist.bench.records import READABLE, Block, RequestRecord, RunFile, draft_path
from soloist.errors import UserError
from soloist.weights.json_file import read_json

WRITTEN = "give a file that `soloist bench run --output` wrote"


def rounds_path(path: Path) -> Path:
    """Where the blocks of a run lie: demo.json -> demo.rounds.jsonl."""
    return path.with_suffix(".rounds.jsonl")


def check_writable(path: Path) -> None:
    """Before anything is measured.   Raises: UserError where the result could not be written."""
    if not path.parent.is_dir():
        raise UserError(f"--output {path}: there is no folder {path.parent}; make it first")
    for each in (path, rounds_path(path)):
        if each.is_dir():
            raise UserError(f"--output {path}: {each} is a folder; name a file")
    try:
        draft_path(path).touch()
        draft_path(path).unlink()
    except OSError as error:
        raise UserError(f"--output {path}: {error.strerror}; name a place that can be written") from error


class Journal:
    """X.rounds.jsonl of a run that is under way. The file of an earlier run stays until the first request has ended."""

    def __init__(self, output: Path):
        self._path, self._count = rounds_path(output), 0
        self._file: TextIO | None = None

    def add(self, record: RequestRecord) -> None:
        """The next request. It is with the operating system when this returns."""
        self._file = self._file or self._path.open("w")
        self._file.write("".join(request_lines(self._count, record)))
        self._file.flush()
        self._count += 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def request_lines(number: int, record: RequestRecord) -> Iterator[str]:
    """The lines of a request in X.rounds.jsonl."""
    told = [asdict(block) for block in record.blocks] + [{"record": asdict(replace(record, blocks=()))}]
    return (json.dumps({"request": number, **each}, separators=(",", ":")) + "\n" for each in told)


def read_run(path: Path) -> RunFile:
    """Raises: UserError for a file that cannot be read, is not a run, or is of another schema version."""
    content = read_json(path, WRITTEN)
    if not isinstance(content, dict) or "schema_version" not in content:
        raise UserError(f"{path}: is not a benchmark run; {WRITTEN}")
    if content["schema_version"] not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise UserError(f"{path}: has schema version {content['schema_version']}, this soloist reads {known}; run the card again")
    run = from_dict(RunFile, content, str(path))
    rounds = rounds_path(path)
    return _with_rounds(run, rounds) if rounds.exists() else run


def _with_rounds(run: RunFile, path: Path) -> RunFile:
    """With the blocks; and a partial run with the requests that ended after it was written."""
    blocks: dict[int, list[Block]] = {}
    records: dict[int, RequestRecord] = {}
    for where, request, content in _lines(path):
        if "record" in content:
            records[request] = from_dict(RequestRecord, content["record"], where)
        else:
            blocks.setdefault(request, []).append(from_dict(Block, content, where))
    requests = list(run.requests)
    while run.partial and len(requests) in records:
        requests.append(records[len(requests)])
    whole = tuple(replace(r, blocks=tuple(blocks.get(i, ()))) for i, r in enumerate(requests))
    complete = replace(run, requests=whole)
    return complete if len(requests) == len(run.requests) else conclude(complete)


def _lines(path: Path) -> Iterator[tuple[str, int, dict[str, object]]]:
    """Where, request, the rest. A last line without its end is that of a process that was killed."""
    for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            return
        where = f"{path}:{number}"
        try:
            content = json.loads(line)
            request = content.pop("request")
        except (ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{where}: is not a round; delete the file, and read the run without its rounds") from error
        yield where, request, content
