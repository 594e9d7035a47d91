"""y = x W^T with the same bits for a row however many rows stand beside it.

BLAS libraries take another path for one row (a matrix-vector product that sums in another order), so one row is sent
as two equal ones. With two rows or more, weights on the left-hand side, every output is summed in the same order.
In fp32 on x86 the weights are packed once in the layout the matrix kernel reads: that halves the time of a window of
2 to 16 rows, which would otherwise repack the weights at each call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from soloist.ops.cases import case, randn
from soloist.ops.op import Case, op


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] in the layout of MKL's packed matrix product. `like` only carries its shape."""

    packed: torch.Tensor
    like: torch.Tensor


Weight = torch.Tensor | PackedWeight


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this weight can be packed here (fp32, on the CPU, MKL present, more than one output)."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.shape[0] > 1
        and torch.backends.mkl.is_available()
        and hasattr(torch.ops.mkl, "_mkl_linear")
    )


def pack(weight: torch.Tensor) -> PackedWeight:
    """Pack a weight [N, K]. The original may be freed afterwards."""
    assert can_pack(weight), (weight.device, weight.dtype, tuple(weight.shape))
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, MANY_ROWS)
    return PackedWeight(packed, weight.new_zeros(1).expand(weight.shape))


MANY_ROWS = 16
"""Row count the packing is tuned for. The packed layout serves every other count too."""


def at_least_two(x: torch.Tensor) -> torch.Tensor:
    """x [T, ...] with its only row repeated if T is 1."""
    return x if x.shape[0] > 1 else torch.cat((x, x))


def _case(T: int, K: int, N: int) -> Case:
    return case(lambda g: {"x": randn(g, T, K), "weight": randn(g, N, K, scale=K**-0.5)}, f"T{T}-K{K}-N{N}")


@op(cases=[_case(1, 64, 101), _case(4, 96, 24), _case(16, 131, 300), _case(3, 576, 960)], rows="x")
def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply every row by the weight.

    Args: x [T, K]; weight [N, K] in x's dtype, or that weight packed; bias [N].   Returns: [T, N] in x's dtype.
    """
    rows = at_least_two(x)
    if isinstance(weight, PackedWeight):
        y = torch.ops.mkl._mkl_linear(rows, weight.packed, weight.like, None, rows.shape[0])
    elif x.dtype == torch.float32 and rows.shape[0] <= MANY_ROWS:
        y = two_columns_mm(weight, rows)
    else:
        y = F.linear(rows, weight)
    y = y[: x.shape[0]]
    return y if bias is None else y + bias


def two_columns_mm(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """rows W^T computed as (W rows^T)^T, at least two rows [T, K]; a weight of one output is doubled as well."""
    if weight.shape[0] == 1:
        return torch.mm(torch.cat((weight, weight)), rows.t().contiguous())[:1].t()
    return torch.mm(weight, rows.t().contiguous()).t()


def _grouped_case(T: int, H: int, K: int, N: int) -> Case:
    return case(lambda g: {"x": randn(g, T, H, K), "weight": randn(g, H, N, K)}, f"T{T}-H{H}-K{K}-N{N}")


@op(cases=[_grouped_case(1, 4, 32, 48), _grouped_case(5, 3, 33, 17), _grouped_case(16, 16, 128, 512)],
    rows="x", atol=1e-4)  # fmt: skip
def grouped_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply head h of every row by weight h.

    Args: x [T, H, K]; weight [H, N, K].   Returns: [T, H, N].
    """
    columns = at_least_two(x).permute(1, 2, 0).contiguous()  # [H, K, T]
    return torch.bmm(weight, columns).permute(2, 0, 1)[: x.shape[0]]
