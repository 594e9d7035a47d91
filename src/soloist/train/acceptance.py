"""Acceptance length of a drafter on texts that the target itself wrote greedily.

The target's next tokens are known, so every round of speculation can be replayed from proposals made at all positions
at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from soloist.drafters.ngram import CONFIDENCE
from soloist.ops.ngram_match import ngram_match
from soloist.train.sample import Sequences


def replay(ids: list[int], proposals: list[list[int]], start: int, end: int) -> tuple[int, list[int]]:
    """Rounds that greedy speculation needs for one text.

    Args: ids the whole text; proposals[n] what is drafted when ids[n] was just emitted, for positions n + 1 on;
        start position of the first new token (prefill emits it); end one past the last token.
    Returns: tokens emitted by rounds, and the accepted drafts of each round.
    """
    accepted: list[int] = []
    n = start
    while n + 1 < end:
        hits = 0
        for drafted in proposals[n]:
            # a round's last token comes from the target, so a draft of the last position only counts as that token
            if n + 1 + hits >= end - 1 or drafted != ids[n + 1 + hits]:
                break
            hits += 1
        accepted.append(hits)
        n += hits + 1
    return max(0, n - start), accepted


def mean_length(ids: Tensor, proposals: Tensor, start: Tensor, end: Tensor) -> tuple[float, list[float]]:
    """Tokens per round over many texts, and the share of rounds that accept at least k drafts, k = 1...K.

    Args: ids [N, T]; proposals [N, T, K]; start, end [N].
    """
    tokens, rounds = 0, 0
    at_least = [0] * proposals.shape[-1]
    for row in range(len(ids)):
        emitted, accepted = replay(ids[row].tolist(), proposals[row].tolist(), int(start[row]), int(end[row]))
        tokens, rounds = tokens + emitted, rounds + len(accepted)
        for hits in accepted:
            for k in range(hits):
                at_least[k] += 1
    return tokens / max(1, rounds), [count / max(1, rounds) for count in at_least]


def ngram_proposals(texts: Sequences, width: int) -> Tensor:
    """What prompt lookup drafts after every token of every answer: [N, T, K]."""
    out = torch.zeros(*texts.ids.shape, width, dtype=torch.long)
    for row, ids in enumerate(texts.ids.cpu()):
        for n in range(int(texts.prompt[row]), int(texts.end[row])):
            out[row, n] = ngram_match.reference(ids, torch.tensor([n]), len(CONFIDENCE) - 1, width)[0]
    return out
