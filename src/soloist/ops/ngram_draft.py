"""The n-gram drafter's round: look up what came after, and say how sure it is."""

from __future__ import annotations

import torch

from soloist.ops.cases import case
from soloist.ops.ngram_match import ngram_match
from soloist.ops.op import Case, op


def _case(S: int, end: int, n: int, longest: int, width: int, vocab: int) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        return {"history": torch.randint(vocab, (S,), generator=g), "start": torch.tensor([end - n]),
                "n": torch.tensor([n]), "table": torch.rand(longest + 1, generator=g),
                "tokens": torch.zeros(width, dtype=torch.int64), "chances": torch.zeros(width)}  # fmt: skip

    return case(draw, f"S{S}-end{end}-L{longest}-K{width}-V{vocab}")


@op(cases=[_case(2, 0, 0, 8, 3, 4), _case(13, 9, 2, 3, 5, 2), _case(300, 299, 1, 8, 15, 3), _case(300, 120, 5, 8, 15, 50),
           _case(9000, 8191, 4, 8, 7, 12), _case(9000, 8999, 4, 8, 7, 100000)])  # fmt: skip
def ngram_draft(
    history: torch.Tensor,
    start: torch.Tensor,
    n: torch.Tensor,
    table: torch.Tensor,
    tokens: torch.Tensor,
    chances: torch.Tensor,
) -> torch.Tensor:
    """What `ngram_match` copies behind place start + n, and each copy's chance by the tokens that match before it.

    Args: history [S] int64; start, n [1] int64; table [longest + 1] fp32, the chance after that many matching tokens,
        the last for more. One matching token counts as none.
    Writes: tokens [K] int64, chances [K] fp32.   Returns: length [1] int64 of the match.
    """
    longest, width = table.shape[0] - 1, tokens.shape[0]
    found, length = ngram_match.reference(history, start + n, longest, width)
    tokens.copy_(found)
    matched = (length + torch.arange(width, device=length.device)).clamp_max(longest)
    chances.copy_(torch.where(length > 1, table[matched], 0.0))
    return length
