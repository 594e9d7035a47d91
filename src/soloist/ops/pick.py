"""Picking: the token with the highest score, after noise where the request samples."""

from __future__ import annotations

import torch

from soloist.ops.cases import case, randn
from soloist.ops.noise import gumbel
from soloist.ops.op import Case, op

Noise = tuple[torch.Tensor, torch.Tensor]
"""(temperature [1] fp32, seed [1] int64)."""


def _case(T: int, V: int, temperature: float | None, ties: bool = False) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        scores = randn(g, T, V, scale=4)
        noise = None if temperature is None else (torch.tensor([temperature]), torch.tensor([-5 << 40]))
        return {"scores": scores.round() if ties else scores, "places": torch.arange(9, 9 + T), "noise": noise}

    return case(draw, f"T{T}-V{V}-{temperature}{'-ties' if ties else ''}")


@op(
    cases=[_case(1, 101, None), _case(4, 3000, None, ties=True), _case(1, 2049, 1.0), _case(16, 1024, 0.7),
           _case(3, 5000, 1e-6), _case(2, 5000, 1e-42)],
    rows="scores places",
)  # fmt: skip
def pick(scores: torch.Tensor, places: torch.Tensor, noise: Noise | None) -> torch.Tensor:
    """The best token of every row; of equal ones the lowest. Noise makes it a draw from softmax(scores / temperature).

    The noise is that of `gumbel`, equal on every device as far as the logarithm is.

    Args: scores [T, V] fp32, minus infinity for what must not be picked; places [T] int64, which the picks will take.
    Returns: [T] int64.
    """
    if noise is None:
        return scores.argmax(-1)
    temperature, seed = noise
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature
    return (scores + gumbel(places, seed, scores.shape[-1])).argmax(-1)
