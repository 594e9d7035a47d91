"""Kimi Delta Attention of one window after its input projections: conv, norms, gates, delta rule, gated norm."""

from __future__ import annotations

import torch

from soloist.ops.elementwise import sigmoid
from soloist.ops.kda_chunk import kda_chunk
from soloist.ops.kda_step import kda_step
from soloist.ops.short_conv import short_conv, short_conv_prefill

L2_EPS = 1e-6


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension, fp32."""
    x = x.float()
    return x * x.square().sum(-1, keepdim=True).add_(L2_EPS).rsqrt_()


def log_decay(f: torch.Tensor, rate: torch.Tensor, bias: torch.Tensor, lower_bound: float) -> torch.Tensor:
    """The bounded gate law: lower_bound * sigmoid(rate (f + bias)), fp32.

    Args: f [T, H, D]; rate [H] = exp(A_log); bias [H, D].   Returns: [T, H, D] in (lower_bound, 0).
    Source: Ling-3.0 ("safe gate"); fla's kda lower-bound gate.
    """
    return sigmoid((f.float() + bias) * rate[:, None]) * lower_bound


def gated_rms_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of each head times sigmoid(z), all fp32: o, z [T, H, D]; weight [D]."""
    scale = o.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return o * scale * weight.float() * sigmoid(z.float())


def kda(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    rate: torch.Tensor,
    bias: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    lower_bound: float,
    history: torch.Tensor,
    states: torch.Tensor,
    start: torch.Tensor,
    live: torch.Tensor,
    prefill: bool,
) -> torch.Tensor:
    """Args: projected [T, 5A + H] = q | k | v | f | z | b with A = H * D; conv_weight [3A, W] fp32; rate [H] = exp(A_log)
        and bias [H, D] fp32; norm = (weight [D], eps); history [R, 3A]; states [slots, H, D, D] fp32; start and live
        [1], on the device: first position and state slot to start from.
    Writes: history at the window's positions; states as `kda_step`, in prefill as `kda_chunk`.
    Returns: [T, A] in projected's dtype.   Source: Kimi Linear paper; Ling-3.0 checkpoints.
    """
    T, (H, D) = projected.shape[0], bias.shape
    A = H * D
    qkv, f, z, b = projected.split((3 * A, A, A, H), -1)
    conv = short_conv_prefill if prefill else short_conv
    q, k, v = conv(qkv, conv_weight, history, start).float().view(T, 3, H, D).unbind(1)
    q, k = l2_norm(q) * D**-0.5, l2_norm(k)
    g = log_decay(f.view(T, H, D), rate, bias, lower_bound)
    rule = kda_chunk if prefill else kda_step
    o = rule(q, k, v, g, sigmoid(b.float()), states, live)
    return gated_rms_norm(o, z.view(T, H, D), *norm).to(projected.dtype).reshape(T, A)
