"""Causal depthwise convolution over a few tokens, with its history kept by position."""

from __future__ import annotations

import torch

from soloist.ops.cases import case, randn
from soloist.ops.elementwise import silu
from soloist.ops.op import Case, op


def _case(T: int, C: int, start: int) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        return {"x": randn(g, T, C), "weight": randn(g, C, 4), "history": randn(g, 23, C),
                "start": torch.tensor([start])}  # fmt: skip

    return case(draw, f"T{T}-C{C}-start{start}")


@op(cases=[_case(1, 96, 0), _case(4, 101, 21), _case(16, 384, 1000)])
def short_conv(
    x: torch.Tensor, weight: torch.Tensor, history: torch.Tensor, start: torch.Tensor
) -> torch.Tensor:
    """SiLU(causal convolution) of every channel; fp32 inside, one rounding.

    The input of position p is kept in row p mod R of the history, so that rows of rejected tokens are simply
    overwritten; R >= T + W - 1. Row p < 0 must be zero. Tap W - 1 multiplies the current token.

    Args: x [T, C]; weight [C, W] fp32; history [R, C] in x's dtype; start [1], on the device.
    Writes: history at the window's positions.   Returns: [T, C] in x's dtype.
    """
    T, (R, W) = x.shape[0], (history.shape[0], weight.shape[1])
    assert R >= T + W - 1, (R, T, W)
    rows = (start + torch.arange(1 - W, T, device=x.device)) % R
    history.index_copy_(0, rows[W - 1 :], x)
    return convolve(history.index_select(0, rows), weight).to(x.dtype)


def convolve(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """SiLU of the convolution of inputs [T + W - 1, C] with weight [C, W]: [T, C] fp32."""
    W = weight.shape[1]
    inputs, taps = inputs.float(), weight.t()
    T = inputs.shape[0] - W + 1
    y = inputs[:T] * taps[0]
    for i in range(1, W):
        y = y + inputs[i : i + T] * taps[i]
    return silu(y)


def short_conv_prefill(
    x: torch.Tensor, weight: torch.Tensor, history: torch.Tensor, start: torch.Tensor
) -> torch.Tensor:
    """The same for a window of any length; only the last W - 1 inputs are kept."""
    T, (R, W) = x.shape[0], (history.shape[0], weight.shape[1])
    before = (start + torch.arange(1 - W, 0, device=x.device)) % R
    inputs = torch.cat((history.index_select(0, before), x))
    kept = (start + torch.arange(T - W + 1, T, device=x.device)) % R
    history.index_copy_(0, kept, inputs[T:])
    return convolve(inputs, weight).to(x.dtype)
