"""y = x W^T with the same bits for a row however many rows stand beside it.

In fp32 on a CPU the weights are packed once in the layout that oneDNN's matrix kernel reads: a window of one row then
runs at the speed of memory, and a window of several would otherwise repack the weights at each call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from soloist.ops.cases import case, randn
from soloist.ops.op import Case, op
from soloist.ops.row_product import row_product

MANY_ROWS = 16
"""The widest window. The packing is tuned for it and serves every other row count too."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] in oneDNN's layout, multiplied by at least `tile` rows at a time."""

    packed: torch.Tensor
    tile: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        T = x.shape[0]
        if T < self.tile:
            x = F.pad(x, (0, 0, 0, self.tile - T))
        return torch.ops.mkldnn._linear_pointwise(x.contiguous(), self.packed, None, "none", [], "")[:T]


Weight = torch.Tensor | PackedWeight


def pack(weight: torch.Tensor) -> PackedWeight | None:
    """Pack a weight [N, K], whose original may be freed afterwards; None where that cannot be had.

    The packed product must keep a row's bits in every company; that is tried on the first weight of every shape.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), MANY_ROWS)
    key = tuple(weight.shape), torch.get_num_threads()
    if key not in _TILES:
        _TILES[key] = _invariant_tile(packed, weight.shape[1])
    tile = _TILES[key]
    return None if tile is None else PackedWeight(packed, tile)


_TILES: dict[tuple[tuple[int, ...], int], int | None] = {}
"""Shape and number of threads -> fewest rows for which the packed product is invariant."""


def _invariant_tile(packed: torch.Tensor, K: int) -> int | None:
    """The fewest rows, one or two, from which on the packed product gives a row the same bits in every company."""
    x = torch.randn(MANY_ROWS, K, generator=torch.Generator().manual_seed(0))
    for tile in (1, 2):
        product = PackedWeight(packed, tile)
        whole = product(x)
        if all(torch.equal(product(x[:T]), whole[:T]) for T in range(1, MANY_ROWS)):
            return tile
    return None


def _case(T: int, K: int, N: int) -> Case:
    return case(lambda g: {"x": randn(g, T, K), "weight": randn(g, N, K, scale=K**-0.5)}, f"T{T}-K{K}-N{N}")


@op(cases=[_case(1, 64, 101), _case(4, 96, 24), _case(16, 131, 300), _case(3, 576, 960)], rows="x")
def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply every row by the weight.

    Args: x [T, K]; weight [N, K] in x's dtype, or that weight packed; bias [N].   Returns: [T, N] in x's dtype.
    """
    if isinstance(weight, PackedWeight):
        y = weight(x)
    elif x.shape[0] <= MANY_ROWS:
        y = row_product(x, weight)
    else:
        y = F.linear(x, weight)
    return y if bias is None else y + bias


@op(cases=[_case(1, 64, 101), _case(5, 96, 24), _case(16, 320, 300)], rows="x")
def linear_fp32(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """`linear` whose result is fp32 whatever the dtype of x and weight: [T, N]. For logits, which are compared and summed."""
    y: torch.Tensor = linear(x, weight)
    return y.float()


def _grouped_case(T: int, H: int, K: int, N: int) -> Case:
    return case(lambda g: {"x": randn(g, T, H, K), "weight": randn(g, H, N, K)}, f"T{T}-H{H}-K{K}-N{N}")


@op(cases=[_grouped_case(1, 4, 32, 48), _grouped_case(5, 3, 33, 17), _grouped_case(16, 16, 128, 512)],
    rows="x", atol=1e-4)  # fmt: skip
def grouped_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply head h of every row by weight h.

    Args: x [T, H, K]; weight [H, N, K].   Returns: [T, H, N].
    """
    return row_product(x.transpose(0, 1), weight).transpose(0, 1)
