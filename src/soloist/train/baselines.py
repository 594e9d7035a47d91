"""What a trained model has to beat on held-out text: a 5-gram model of the same tokens, gzip and xz."""

from __future__ import annotations

import gzip
import lzma

import numpy as np

DISCOUNT = 0.75
# an odd multiplier spreads n-grams over 64 bits; a collision among 10^8 of them is unlikely and would only help the
# 5-gram
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


def _keys(ids: np.ndarray, order: int) -> np.ndarray:
    """Key of the n-gram that ends at each position, uint64 [N]; the first order - 1 entries are shorter and never
    asked for."""
    keys = np.zeros(len(ids), np.uint64)
    for back in range(order - 1, -1, -1):
        keys[back:] = keys[back:] * _SPREAD + ids[: len(ids) - back].astype(np.uint64) + np.uint64(1)
    return keys


def _look_up(sorted_keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Value of each wanted key, 0 where it is absent."""
    place = np.minimum(np.searchsorted(sorted_keys, wanted), len(sorted_keys) - 1)
    return np.where(sorted_keys[place] == wanted, values[place], 0)


def ngram_bits(train: np.ndarray, held_out: list[np.ndarray], vocab: int, order: int = 5) -> list[float]:
    """Bits that an interpolated n-gram model with absolute discounting needs for each held-out stream.

    Args: train token ids [N]; held_out token ids of several texts; vocab size of the vocabulary; order the longest
        n-gram.
    """
    chances = [np.full(len(ids), 1.0 / vocab) for ids in held_out]
    for n in range(1, order + 1):
        keys, before = _keys(train, n), _keys(train, n - 1) if n > 1 else np.zeros(len(train), np.uint64)
        before = np.concatenate([[np.uint64(0)], before[:-1]]) if n > 1 else before
        grams, first, counts = np.unique(keys[n - 1 :], return_index=True, return_counts=True)
        contexts, totals = np.unique(before[n - 1 :], return_counts=True)
        kinds, distinct = np.unique(before[n - 1 :][first], return_counts=True)
        for index, ids in enumerate(held_out):
            mine = _keys(ids, n)
            past = np.concatenate([[np.uint64(0)], _keys(ids, n - 1)[:-1]]) if n > 1 else np.zeros(len(ids), np.uint64)
            count, total = _look_up(grams, counts, mine), _look_up(contexts, totals, past)
            kept = np.maximum(count - DISCOUNT, 0) + DISCOUNT * _look_up(kinds, distinct, past) * chances[index]
            seen = total > 0
            seen[: n - 1] = False
            chances[index] = np.where(seen, kept / np.maximum(total, 1), chances[index])
    return [float(-np.log2(p).sum()) for p in chances]


def compressed_bits(text: bytes) -> dict[str, int]:
    """Bits of a text as gzip -9 and xz -9 write it."""
    return {"gzip": 8 * len(gzip.compress(text, 9)), "xz": 8 * len(lzma.compress(text, preset=9))}
