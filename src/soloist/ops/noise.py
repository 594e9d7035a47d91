"""Gumbel noise that is a function of (seed, position, token) and of nothing else.

A token is then the argmax of logits plus noise, whatever drafted it and however wide the window was, so acceptance is
equality at every temperature. Source of the idea: drafter-invariant speculative decoding (arXiv 2408.07978).
"""

from __future__ import annotations

import torch

from soloist.ops.cases import case
from soloist.ops.op import Case, op

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B1


def mix(h: torch.Tensor) -> torch.Tensor:
    """Murmur3's 32-bit finaliser on int64 tensors that hold 32-bit values."""
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _MASK
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


def _case(T: int, V: int, first: int) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        return {"positions": torch.arange(7, 7 + T), "seed": torch.tensor([-5]), "vocab": V, "first": first}

    return case(draw, f"T{T}-V{V}-{first}")


@op(cases=[_case(1, 101, 0), _case(16, 1000, 77)], rows="positions")
def gumbel(positions: torch.Tensor, seed: torch.Tensor, vocab: int, first: int = 0) -> torch.Tensor:
    """Standard Gumbel noise for `vocab` tokens from `first` on at every position.

    Args: positions [T] int64, the place the picked token will take; seed [1] int64.   Returns: [T, vocab] fp32.
    """
    key = mix((seed & _MASK) ^ mix(((seed >> 32) & _MASK) + _GOLDEN))
    key = mix(key ^ mix((positions * _GOLDEN + 1) & _MASK))  # [T]
    token = torch.arange(first, first + vocab, device=positions.device)
    bits = mix((token * _GOLDEN & _MASK) ^ key[:, None])
    bits = mix((bits + key[:, None]) & _MASK)
    # A small uniform makes a large value, and fp32 keeps all bits of small ones; 1 would make minus infinity.
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp_max(1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))
