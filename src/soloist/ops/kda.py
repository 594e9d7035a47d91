"""Kimi Delta Attention of one window between its projections: conv, norms of q and k, gates, delta rule."""

from __future__ import annotations

import torch

from soloist.ops.cases import case, randn
from soloist.ops.elementwise import sigmoid
from soloist.ops.kda_chunk import kda_chunk
from soloist.ops.kda_step import kda_step
from soloist.ops.op import Case, op
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


def _case(T: int, H: int, D: int, start: int, live: int) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        A = H * D
        return {"projected": randn(g, T, 5 * A + H), "conv_weight": randn(g, 3 * A, 4), "rate": randn(g, H).exp(),
                "bias": randn(g, H, D), "lower_bound": -5.0, "history": randn(g, 20, 3 * A), "states": randn(g, 17, H, D, D),
                "start": torch.tensor([start]), "live": torch.tensor([live])}  # fmt: skip

    return case(draw, f"T{T}-H{H}-D{D}-start{start}-live{live}")


@op(cases=[_case(1, 2, 32, 0, 0), _case(4, 3, 24, 21, 2), _case(16, 2, 64, 1000, 16)], rtol=1e-4, atol=1e-4)
def kda_decode(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    rate: torch.Tensor,
    bias: torch.Tensor,
    lower_bound: float,
    history: torch.Tensor,
    states: torch.Tensor,
    start: torch.Tensor,
    live: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The window of a round; the arguments are those of `kda`.

    Writes: history at the window's positions; states as `kda_step`.   Returns: o [T, H, D] fp32.
    """
    return _attend(projected, conv_weight, rate, bias, lower_bound, history, states, start, live, prefill=False)


@op(cases=[_case(3, 2, 32, 0, 0), _case(1, 2, 24, 7, 2), _case(64, 1, 64, 20, 3), _case(150, 3, 24, 19, 1)],
    rtol=2e-4, atol=2e-4)  # fmt: skip
def kda_prefill(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    rate: torch.Tensor,
    bias: torch.Tensor,
    lower_bound: float,
    history: torch.Tensor,
    states: torch.Tensor,
    start: torch.Tensor,
    live: torch.Tensor,
) -> torch.Tensor:
    """A window of any length, all of which stays; the arguments are those of `kda`.

    Writes: the window's last conv inputs to the history; the last state to slot 0.   Returns: o [T, H, D] fp32.
    """
    return _attend(projected, conv_weight, rate, bias, lower_bound, history, states, start, live, prefill=True)


def kda(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    rate: torch.Tensor,
    bias: torch.Tensor,
    lower_bound: float,
    history: torch.Tensor,
    states: torch.Tensor,
    start: torch.Tensor,
    live: torch.Tensor,
    prefill: bool,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Args: projected [T, 5A + H] = q | k | v | f | z | b with A = H * D; conv_weight [3A, W] fp32; rate [H] = exp(A_log)
        and bias [H, D] fp32; history [R, 3A]; states [slots, H, D, D] fp32; start and live [1], on the device: first
        position and state slot to start from; rows [1] int64 where only the first of a round's window count: what is
        written and returned for the others means nothing.
    Writes: history at the window's positions; states as `kda_step`, in prefill as `kda_chunk`.
    Returns: (o [T, H, D] fp32, its gate z [T, H, D]).   Source: Kimi Linear paper; Ling-3.0 checkpoints.
    """
    shared = (projected, conv_weight, rate, bias, lower_bound, history, states, start, live)
    o = kda_prefill(*shared) if prefill else kda_decode(*shared, rows)
    H, D = bias.shape
    return o, projected[:, 4 * H * D : 5 * H * D].view(-1, H, D)


def _attend(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    rate: torch.Tensor,
    bias: torch.Tensor,
    lower_bound: float,
    history: torch.Tensor,
    states: torch.Tensor,
    start: torch.Tensor,
    live: torch.Tensor,
    prefill: bool,
) -> torch.Tensor:
    T, (H, D) = projected.shape[0], bias.shape
    A = H * D
    qkv, f, _, b = projected.split((3 * A, A, A, H), -1)
    conv = short_conv_prefill if prefill else short_conv
    q, k, v = conv(qkv, conv_weight, history, start).float().view(T, 3, H, D).unbind(1)
    q, k = l2_norm(q) * D**-0.5, l2_norm(k)
    g = log_decay(f.view(T, H, D), rate, bias, lower_bound)
    rule = kda_chunk if prefill else kda_step
    return rule(q, k, v, g, sigmoid(b.float()), states, live)
