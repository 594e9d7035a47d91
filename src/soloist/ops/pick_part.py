"""Picking from a vocabulary that ranks share: each finds the best of its own columns, and one of them has the best of all."""

from __future__ import annotations

import torch

from soloist.ops.cases import case, randn
from soloist.ops.noise import gumbel
from soloist.ops.op import Case, op
from soloist.ops.pick import Noise

MOST_TOKENS = 1 << 24
"""Token ids travel as fp32, which holds whole numbers up to here."""


def _case(T: int, V: int, first: int, temperature: float | None, ties: bool = False) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        scores = randn(g, T, V, scale=4)
        noise = None if temperature is None else (torch.tensor([temperature]), torch.tensor([-5 << 40]))
        return {"scores": scores.round() if ties else scores, "places": torch.arange(9, 9 + T), "noise": noise,
                "first": first}  # fmt: skip

    return case(draw, f"T{T}-V{V}-{first}-{temperature}{'-ties' if ties else ''}")


@op(
    cases=[_case(1, 101, 0, None), _case(4, 3000, 101, None, ties=True), _case(1, 2049, 77, 1.0), _case(16, 1024, 9, 0.7)],
    rows="scores places",
)  # fmt: skip
def pick_part(scores: torch.Tensor, places: torch.Tensor, noise: Noise | None, first: int) -> torch.Tensor:
    """The best token of some columns, with the noise that `pick` would give it.

    Args: scores [T, V'] fp32 of the tokens from `first` on; places and noise as in `pick`.
    Returns: [T, 3] fp32: the best score, less the columns' largest if there is noise; that largest; the token.
    """
    peak = scores.amax(-1)
    if noise is not None:
        temperature, seed = noise
        scores = (scores - peak[:, None]) / temperature + gumbel(places, seed, scores.shape[-1], first)
    best, token = scores.max(-1)
    return torch.stack((best, peak, (token + first).float()), -1)


def _best_case(R: int, T: int, temperature: float | None) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        tokens = torch.arange(R * T).view(R, T).float() * 1000 + 7
        parts = torch.stack((randn(g, R, T).round(), randn(g, R, T), tokens), -1)
        return {"parts": parts, "temperature": None if temperature is None else torch.tensor([temperature])}

    return case(draw, f"R{R}-T{T}-{temperature}")


@op(cases=[_best_case(4, 1, None), _best_case(3, 16, 0.8), _best_case(2, 5, 1e-6)])
def pick_best(parts: torch.Tensor, temperature: torch.Tensor | None) -> torch.Tensor:
    """The best of what the ranks' columns have; of equal ones the first rank's, which is the lowest token.

    Args: parts [R, T, 3] of `pick_part`; temperature [1] of its noise.   Returns: [T] int64.
    """
    best, peak, token = parts.unbind(-1)
    if temperature is not None:
        best = best + (peak - peak.amax(0)) / temperature
    winner = best.argmax(0)
    return token.gather(0, winner[None])[0].long()
