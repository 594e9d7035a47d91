"""Sigmoid and SiLU whose bits do not depend on where an element lies.

torch's CPU kernels for sigmoid and silu treat the last elements of a tensor with scalar code that rounds differently
from the vector code, so a row would change with the number of rows beside it. exp has no such tail.
"""

from __future__ import annotations

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)) in x's dtype (pass fp32)."""
    return torch.exp(-x).add_(1.0).reciprocal_()


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x) in x's dtype (pass fp32)."""
    return sigmoid(x).mul_(x)
