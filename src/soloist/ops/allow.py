"""A grammar's verdict on the next token, one bit for each token of the vocabulary."""

from __future__ import annotations

import torch

from soloist.ops.cases import case, randn
from soloist.ops.op import Case, op


def num_words(vocab_size: int) -> int:
    """32-bit words that hold a bit for every token."""
    return -(-vocab_size // 32)


def _case(T: int, V: int) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        words = torch.randint(-(1 << 31), 1 << 31, (T, num_words(V)), generator=g)
        return {"logits": randn(g, T, V), "packed": words.to(torch.int32)}

    return case(draw, f"T{T}-V{V}")


@op(cases=[_case(1, 101), _case(4, 64), _case(16, 999)], rows="logits packed")
def allow(logits: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Logits of tokens whose bit is not set become minus infinity.

    Args: logits [T, V] fp32; packed [T, num_words(V)] int32, token v in bit v % 32 of word v // 32.
    Returns: [T, V] fp32.
    """
    T, V = logits.shape
    places = torch.arange(32, dtype=torch.int32, device=packed.device)
    bits = (packed[:, :, None] >> places) & 1  # [T, words, 32]
    return logits.masked_fill(bits.view(T, -1)[:, :V] == 0, float("-inf"))
