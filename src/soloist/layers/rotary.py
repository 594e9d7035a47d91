"""Rotary angles: inverse frequencies of every rope variant, and cos and sin for the rows of a window."""

from __future__ import annotations

import math

import torch

from soloist.config import RopeConfig
from soloist.ops.rotation import rotation


class Rotary:
    """Angles of one rope configuration. Source of the variants: Hugging Face transformers' rope utilities."""

    def __init__(self, config: RopeConfig, device: torch.device):
        self.config = config
        self.inverse = inverse_frequencies(config).to(device)

    def tables(self, positions: torch.Tensor, base_length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Args: positions [T] int64; base_length [1] int64, the prompt's length.   Returns: cos, sin [T, dim/2] fp32."""
        inverse = self.inverse
        if self.config.kind == "dynamic":
            inverse = self._dynamic(torch.maximum(positions + 1, base_length))
        return rotation(positions, inverse, self.config.attention_factor)

    def variant(self, base_length: int) -> int:
        """Prompts of lengths with one variant have the same angles at the same places."""
        dynamic = self.config.kind == "dynamic" and base_length > self.config.original_positions
        return base_length if dynamic else 0

    def _dynamic(self, lengths: torch.Tensor) -> torch.Tensor:
        """NTK frequencies for the context length [T] that each row was computed at: [T, dim/2].

        A row depends on the prompt's length and its own position only, never on the window it came in.
        """
        c = self.config
        stretch = c.factor * lengths.float() / c.original_positions - (c.factor - 1)
        base = c.theta * stretch.clamp_min(1.0) ** (c.dim / (c.dim - 2))
        exponent = torch.arange(0, c.dim, 2, device=lengths.device).float() / c.dim
        return base[:, None] ** -exponent


def inverse_frequencies(c: RopeConfig) -> torch.Tensor:
    """[dim/2] fp32."""
    plain = 1.0 / (c.theta ** (torch.arange(0, c.dim, 2, dtype=torch.int64).float() / c.dim))
    if c.freq_factors:
        return plain / torch.tensor(c.freq_factors)
    if c.kind == "linear":
        return plain / c.factor
    if c.kind == "llama3":
        return _llama3(plain, c)
    if c.kind == "yarn":
        return _yarn(plain, c)
    return plain


def _llama3(plain: torch.Tensor, c: RopeConfig) -> torch.Tensor:
    """Long waves are slowed by the factor, short ones kept, those between blended."""
    wave = 2 * math.pi / plain
    long, short = c.original_positions / c.low_freq_factor, c.original_positions / c.high_freq_factor
    blend = (c.original_positions / wave - c.low_freq_factor) / (c.high_freq_factor - c.low_freq_factor)
    middle = (1 - blend) * plain / c.factor + blend * plain
    return torch.where(wave > long, plain / c.factor, torch.where(wave < short, plain, middle))


def _yarn(plain: torch.Tensor, c: RopeConfig) -> torch.Tensor:
    """Channels that turn often inside the original context keep their frequency, slow ones are stretched."""

    def channel(rotations: float) -> float:
        turns = c.original_positions / (rotations * 2 * math.pi)
        return c.dim * math.log(turns) / (2 * math.log(c.theta))

    low, high = channel(c.beta_fast), channel(c.beta_slow)
    if c.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, c.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(c.dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return plain / c.factor * ramp + plain * (1 - ramp)
