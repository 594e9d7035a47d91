"""The prompts of a workload, as token ids wherever there is a tokenizer, the same ids for every variant and target.

    set:NAME    a bundled set, see prompts/README.md, as it is; `set:all` is all but nano's
    file:PATH   JSONL of your own: `messages`, `turns`, `text` or `token_ids`
    joined      paragraphs of the bundled sets in random order, cut to input_tokens
    tiled       one conversation's question again and again, cut to input_tokens: what SGLang calls `random`, the easiest
                text there is for a drafter, for the sake of comparison with published figures
    random      uniformly random ids of input_tokens, without special ones: no text at all

Only the last needs no tokenizer; `tiled` without one repeats a passage of random ids.
"""

from __future__ import annotations

import hashlib
import json
import random
import zlib
from collections.abc import Collection, Sequence
from importlib.resources import files
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Protocol

from soloist.bench.records import Workload
from soloist.bench.target import Prompt
from soloist.errors import UserError

SETS = ("code", "chat", "maths", "summarisation", "retrieval", "multilingual")
SIZED = ("joined", "tiled", "random")
PASSAGE = 200
"""Ids of the passage that `tiled` repeats where there is no tokenizer: about one question with its answer."""


class Encoder(Protocol):
    """What knows the ids: a loaded model, or a tokenizer beside a server. has_text: whether it takes text at all."""

    vocab_size: int
    special_ids: Collection[int]
    has_text: bool
    has_chat: bool

    def encode(self, prompt: str | Sequence[dict[str, Any]]) -> list[int]: ...


def build_prompts(workload: Workload, seed: int, encoder: Encoder | None, extra: int = 0) -> list[Prompt]:
    """The workload's prompts and, behind them, `extra` others for the warm-up.

    Raises: UserError for prompts that are not there, are too few, or need a tokenizer where there is none.
    """
    family, _, name = workload.prompts.partition(":")
    where = f"workload {workload.name}"
    if family in ("set", "file"):
        if workload.input_tokens is not None:
            raise UserError(f"{where}: prompts={workload.prompts} have their own lengths; remove input_tokens")
        rows = read_rows(workload.prompts, where)
        if workload.num_prompts > len(rows):
            raise UserError(f"{where}: num_prompts={workload.num_prompts}, but {workload.prompts} holds {len(rows)}")
        warm = islice(cycle(rows[workload.num_prompts :] or [_WARM_UP]), extra)
        chosen = [*rows[: workload.num_prompts], *warm]
        return [encoded(row, i, encoder, where) for i, row in enumerate(chosen)]
    if workload.prompts not in SIZED:
        raise UserError(f"{where}: prompts={workload.prompts!r} must be set:NAME, file:PATH or one of {', '.join(SIZED)}")
    if workload.input_tokens is None:
        raise UserError(f"{where}: prompts={workload.prompts} need input_tokens")
    if encoder is None:
        raise UserError(f"{where}: prompts={workload.prompts} need a tokenizer; give the server's as model=FOLDER")
    if workload.prompts == "joined" and not encoder.has_text:
        raise UserError(f"{where}: prompts=joined is text, and the model has no tokenizer; use tiled or random")
    make = {"joined": _joined, "tiled": _tiled, "random": _random}[workload.prompts]
    total = workload.num_prompts + extra
    made = [make(random.Random(f"{seed}/{workload.prompts}/{i}"), i, workload.input_tokens, encoder) for i in range(total)]
    label = workload.domain or workload.prompts
    return [Prompt(f"{label} {i}", label, token_ids=tuple(ids)) for i, ids in enumerate(made)]


def prompts_sha256(prompts: Sequence[Prompt]) -> str:
    """Of everything that is sent: ids where they are known, otherwise the text or the messages."""
    digest = hashlib.sha256()
    for prompt in prompts:
        sent = prompt.token_ids or prompt.text or [dict(message) for message in prompt.messages or ()]
        digest.update(json.dumps(sent, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()


def orderliness(prompt: Prompt) -> float | None:
    """Size of the prompt's ids compressed by zlib, over that of the same ids shuffled; None without ids.

    Prose and code of 500 to 8000 tokens give 0.69 to 0.97, tiled text 0.03 to 0.23, random ids 0.997 to 1.001 (measured
    with two tokenizers). The vocabulary has no part in it.
    """
    if not prompt.token_ids:
        return None
    shuffled = list(prompt.token_ids)
    random.Random(0).shuffle(shuffled)
    return _compressed(prompt.token_ids) / _compressed(shuffled)


def _compressed(ids: Sequence[int]) -> int:
    return len(zlib.compress(b"".join(token.to_bytes(4, "little") for token in ids), 9))


_WARM_UP = {
    "domain": "warm-up",
    "messages": [{"role": "user", "content": "Count from one to thirty in words, and say what a harbour is."}],
}


def read_rows(prompts: str, where: str) -> list[dict[str, Any]]:
    """The rows of `set:NAME` or `file:PATH`.   Raises: UserError for a set or file that is not there, or is no JSONL."""
    family, _, name = prompts.partition(":")
    return _bundled(name, where) if family == "set" else _own(Path(name), where)


def _bundled(name: str, where: str) -> list[dict[str, Any]]:
    if name == "all":
        return [row for each in SETS for row in _bundled(each, where)]
    if name not in (*SETS, "nano"):
        raise UserError(f"{where}: no prompt set {name!r}; sets are all, {', '.join(SETS)}, nano")
    text = (files("soloist.bench") / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8")
    return [{"domain": name, **json.loads(line)} for line in text.splitlines()]


def _own(path: Path, where: str) -> list[dict[str, Any]]:
    """Prompts of the user's own; the first of several `turns` is sent."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{where}: {path} cannot be read ({error.strerror})") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if "turns" in row:
                row["messages"] = [{"role": "user", "content": row["turns"][0]}]
            if not ({"messages", "text", "token_ids"} & set(row)):
                raise KeyError("messages, turns, text or token_ids")
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise UserError(f"{where}: {path}:{number} is not a prompt ({error})") from error
        rows.append({"domain": path.stem, **row})
    return rows


def encoded(row: dict[str, Any], index: int, encoder: Encoder | None, where: str) -> Prompt:
    """One row as it is sent.   Raises: UserError for text without a tokenizer."""
    domain, messages = str(row.get("domain", "")), row.get("messages")
    text = str(row["text"]) if "text" in row else None
    if messages and encoder is not None and not encoder.has_chat:
        text, messages = "\n\n".join(str(message["content"]) for message in messages), None
    ids = row.get("token_ids")
    if ids is None and encoder is not None:
        if not encoder.has_text:
            raise UserError(f"{where}: its prompts are text, and the model has no tokenizer; use prompts=random")
        ids = encoder.encode(messages or [] if text is None else text)
    return Prompt(
        f"{domain} {index}", domain, None if ids is None else tuple(ids), text, None if messages is None else tuple(messages)
    )


def _contents(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [message["content"] for row in rows for message in row["messages"]]


def _joined(rng: random.Random, index: int, length: int, encoder: Encoder) -> list[int]:
    ids: list[int] = []
    while len(ids) < length:
        texts = [part for text in _contents(_bundled("all", "")) for part in text.split("\n\n")]
        rng.shuffle(texts)
        ids += encoder.encode("\n\n".join(texts))
    return ids[:length]


def _tiled(rng: random.Random, index: int, length: int, encoder: Encoder) -> list[int]:
    """Every passage begins with a number of its own, so that no two prompts share a beginning."""
    if encoder.has_text:
        texts = _contents(_bundled("chat", ""))
        passage = encoder.encode(f"{index + 1}. {texts[index % len(texts)]}\n\n")
    else:
        passage = _random(rng, index, PASSAGE, encoder)
    return list(islice(cycle(passage), length))


def _random(rng: random.Random, index: int, length: int, encoder: Encoder) -> list[int]:
    ids: list[int] = []
    while len(ids) < length:
        token = rng.randrange(encoder.vocab_size)
        if token not in encoder.special_ids:
            ids.append(token)
    return ids
