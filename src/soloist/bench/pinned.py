"""Pinned acceptance: a script for the scripted drafter that makes rounds of a wanted mean length.

It knows the text that plain decoding writes and proposes it, but for one wrong token wherever a round shall end. What
comes out says how fast an engine is at that acceptance, and nothing of any drafter: such results are called synthetic.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path


def round_lengths(total: int, mean: float) -> list[int]:
    """Whole numbers, the two beside `mean` in the most even mix, that sum to `total` (the last one may be cut)."""
    lengths: list[int] = []
    done = 0
    while done < total:
        length = min(round((len(lengths) + 1) * mean) - done, total - done)
        lengths.append(length)
        done += length
    return lengths


def pinned_script(text: Sequence[int], width: int, mean: float, vocab_size: int) -> list[int]:
    """Proposals for every output index.

    Args: text: ids that plain decoding emits; width: tokens drafted a round; mean: tokens emitted a round, from 1 to
    width + 1. The first id is the prefill's, so rounds begin at output index 1.
    """
    assert 1 <= mean <= width + 1, (mean, width)
    script, start = list(text), 1
    for length in round_lengths(len(text) - 1, mean):
        last = start + length - 1
        if length <= width and last < len(text) - 1:  # a round of width + 1 ends by itself, and the last by its budget
            script[last] = (text[last] + 1) % vocab_size
        start += length
    return script


def write_script(path: Path, script: Sequence[int]) -> None:
    """As `drafter_path` of drafter=scripted takes it."""
    path.write_text(json.dumps({"script": list(script)}))
