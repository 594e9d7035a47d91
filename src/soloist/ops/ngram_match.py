"""Prompt lookup: where did the end of the text occur before, and what came after it there?"""

from __future__ import annotations

import torch

from soloist.ops.cases import case
from soloist.ops.op import Case, op


def _case(S: int, end: int, longest: int, width: int, vocab: int) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        history = torch.randint(vocab, (S,), generator=g)
        return {"history": history, "end": torch.tensor([end]), "longest": longest, "width": width}

    return case(draw, f"S{S}-end{end}-L{longest}-K{width}-V{vocab}")


@op(cases=[_case(1, 0, 8, 3, 4), _case(13, 9, 3, 5, 2), _case(300, 299, 8, 15, 3), _case(300, 120, 8, 15, 50)])
def ngram_match(
    history: torch.Tensor, end: torch.Tensor, longest: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the longest suffix of history[: end + 1] that also ends at an earlier place, and copy what followed it.

    Suffixes of more than `longest` tokens count as that long; of equally long ones the most recent is taken. A copy
    that reaches the end of the text goes on with what it copied itself, so a loop is continued for ever. Without a
    match the last token is repeated.

    Args: history [S] int64, valid up to and including place end [1].
    Returns: (tokens [width] int64; length [1] int64 of the match, 0 for none).
    """
    S, device = history.shape[0], history.device
    back = torch.arange(longest, device=device)
    places = torch.arange(S, device=device)
    tail = history[(end - back).clamp_min(0)]
    padded = torch.cat((history.new_full((longest - 1,), -1), history))  # what lies before the text matches nothing
    equal = padded.unfold(0, longest, 1).flip(1) == tail  # [S, longest]: history[i - m] == history[end - m]
    length = equal.int().cumprod(1, dtype=torch.int32).sum(1)
    length = torch.where(places < end, length, 0)
    best = (length * S + places).argmax(0, keepdim=True)
    length = length[best]
    source = torch.where(length > 0, best, end - 1)
    period = end - source
    return history[(source + 1 + torch.arange(width, device=device) % period).clamp(0, S - 1)], length
