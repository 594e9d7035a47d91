"""Helpers that draw the inputs of op cases: named, seeded, with odd sizes beside the real ones."""

from __future__ import annotations

from typing import Any

import torch

from soloist.ops.op import Case


def randn(generator: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator) * scale


def case(draw: Case, name: str) -> Case:
    """Name a case for test ids and reports."""
    draw.__name__ = name
    return draw


def describe(arguments: dict[str, Any]) -> str:
    """Shapes of a case, for reports."""
    shapes = {k: tuple(v.shape) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    return ", ".join(f"{k}={v}" for k, v in shapes.items())
