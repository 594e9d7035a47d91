"""Presence, frequency and repetition penalties for every row of a window."""

from __future__ import annotations

import torch

from soloist.ops.cases import case, randn
from soloist.ops.op import Case, op


def _case(T: int, V: int) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        return {"logits": randn(g, T, V), "window": torch.randint(V, (T,), generator=g),
                "counts": torch.randint(3, (V,), generator=g), "prompt": torch.rand(V, generator=g) < 0.2,
                "presence": torch.tensor([0.5]), "frequency": torch.tensor([-0.3]),
                "repetition": torch.tensor([1.3])}  # fmt: skip

    return case(draw, f"T{T}-V{V}")


@op(cases=[_case(1, 101), _case(4, 33), _case(16, 300)])
def penalise(
    logits: torch.Tensor,
    window: torch.Tensor,
    counts: torch.Tensor,
    prompt: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> torch.Tensor:
    """Row j is penalised for the tokens emitted so far and for the drafts d_1 .. d_j before it in the window.

    Presence and frequency count generated tokens; repetition divides (or multiplies, below zero) the logits of tokens
    of prompt and output. The committed counts hold the anchor already, so window[0] is not counted again.

    Args: logits [T, V] fp32; window [T]; counts [V] int64, generated tokens; prompt [V] bool, tokens of the prompt;
        presence, frequency, repetition [1] fp32.   Returns: [T, V] fp32.   Source: OpenAI API; CTRL (repetition).
    """
    T, V = logits.shape
    drafted = torch.zeros(T, V, dtype=counts.dtype, device=logits.device)
    drafted[1:].scatter_(1, window[1:, None], 1)
    seen = counts + drafted.cumsum(0)  # [T, V]
    repeated = (seen > 0) | prompt
    factor = torch.where(logits > 0, 1 / repetition, repetition)
    logits = torch.where(repeated, logits * factor, logits)
    return logits - presence * (seen > 0) - frequency * seen
