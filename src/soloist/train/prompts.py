"""Prompts cut from encoded documents: the start of a page, or a conversation up to the model's turn."""

from __future__ import annotations

import numpy as np

from soloist.train.data import Documents

# a prompt leaves at least this much of its page unsaid
LEFT_TOKENS = 24


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
