"""Prompts to write about: cut from encoded documents, taken from files, or invented by the target itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from soloist.bench.prepare import TokenizerEncoder
from soloist.bench.prompts import encoded, read_rows
from soloist.errors import UserError
from soloist.train.data import Documents
from soloist.train.sample import write
from soloist.train.target import Subject

# a prompt leaves at least this much of its page unsaid
LEFT_TOKENS = 24
# most tokens of an invented question, and the temperatures they are drawn at: sensible ones and odd ones
QUESTION_TOKENS = 128
QUESTION_HEAT = (0.7, 1.0)
# questions invented at once, at least; and rounds of it after which a target has shown that it repeats itself
FEWEST, ROUNDS = 64, 8
# stands for the user's words when the template is asked what goes before them
PLACE = "\ue000"


def cut_prompts(
    documents: Documents,
    count: int,
    seed: int,
    *,
    shortest: int = 16,
    longest: int = 96,
    answer_after: int | None = None,
) -> list[list[int]]:
    """Up to `count` prompts of different documents.

    Args: answer_after the token after which the model speaks (`</think>` in conversations); None for plain text,
        where the cut is uniform between `shortest` and `longest` tokens.
    """
    rng = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(documents.lengths)[:-1]]).astype(np.int64)
    out: list[list[int]] = []
    for index in rng.permutation(len(starts)):
        ids = documents.ids[starts[index] : starts[index] + documents.lengths[index]]
        if answer_after is not None:
            turns = np.flatnonzero(ids == answer_after) + 1
            turns = turns[turns <= 2 * longest]
            if not len(turns):
                continue
            cut = int(rng.choice(turns))
        else:
            if len(ids) < shortest + LEFT_TOKENS:
                continue
            cut = int(rng.integers(shortest, min(longest, len(ids) - LEFT_TOKENS) + 1))
        out.append(ids[:cut].astype(int).tolist())
        if len(out) == count:
            break
    return out


def named_prompts(names: Sequence[str], subject: Subject) -> dict[str, list[list[int]]]:
    """Prompts by domain. names: `set:NAME` for a bundled set, `set:all`, or the path of a JSONL file of one's own with
    `messages`, `turns` or `text` in every line.   Raises: UserError for one that is not there.
    """
    encoder = TokenizerEncoder(subject.tokenizer)
    found: dict[str, list[list[int]]] = {}
    for name in names:
        source = name if name.startswith("set:") else f"file:{name}"
        for index, row in enumerate(read_rows(source, name)):
            prompt = encoded(row, index, encoder, name)
            found.setdefault(prompt.domain, []).append(list(prompt.token_ids or ()))
    return found


def invented_prompts(subject: Subject, count: int, seed: int, longest: int) -> list[list[int]]:
    """Questions that the target itself asks: what its chat template puts before a user's words is given, and it goes on
    with the words. A model without a template begins texts, of which the beginnings are taken. Prompts have `longest`
    tokens at most.

    Source: the Magpie paper (arXiv 2406.08464).   Raises: UserError for a target that keeps asking the same.
    """
    found: dict[str, list[int]] = {}
    for turn in range(ROUNDS):
        for text, prompt in _asked(subject, max(FEWEST, count + count // 2), seed + turn, longest):
            if len(prompt) <= longest:
                found.setdefault(text, prompt)
        if len(found) >= count:
            return list(found.values())[:count]
    raise UserError(
        f"{subject.path}: invented {len(found)} different questions where {count} were wanted; ask for fewer texts, or give "
        "prompts of your own"
    )


def _asked(subject: Subject, count: int, seed: int, longest: int) -> Iterator[tuple[str, list[int]]]:
    """Texts and prompts of one turn of inventing."""
    tokenizer, before = subject.tokenizer, _before_the_user(subject)
    opening = tokenizer.encode(before, add_special=False) if before else tokenizer.encode("") or list(subject.stop_ids[:1])
    width = len(opening) + min(QUESTION_TOKENS, longest)
    texts = write(subject.target, [opening] * count, width, subject.stop_ids, seed, QUESTION_HEAT)
    rng = np.random.default_rng(seed)
    for row, start, end in zip(texts.ids.tolist(), texts.prompt.tolist(), texts.end.tolist(), strict=True):
        if not before:
            begun = row[: int(rng.integers(start + 1, max(start + 2, end - LEFT_TOKENS)))]
            yield str(begun), begun
            continue
        text = tokenizer.decode(row[start:end]).strip()
        # a question that was cut off is no question
        if row[end - 1] in subject.stop_ids and text:
            chat = tokenizer.render_chat([{"role": "user", "content": text}])
            yield text, tokenizer.encode(chat, add_special=False)


def _before_the_user(subject: Subject) -> str:
    """What the chat template writes before a user's words; empty without a template."""
    if not subject.tokenizer.has_chat_template:
        return ""
    whole = subject.tokenizer.render_chat([{"role": "user", "content": PLACE}], add_generation_prompt=False)
    return whole.partition(PLACE)[0]
