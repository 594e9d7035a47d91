"""x W^T with the same bits for a row however many rows stand beside it, on any CPU.

BLAS libraries promise no such thing: which kernel runs, and in which order it sums, depends on the number of rows.
Their kernels work in tiles of rows, though, and full tiles are summed alike. So the rows are padded to whole tiles; which
side of the product they stand on and how tall a tile is differ between libraries and processors, and are found out once
in a process by trying. Seen: tiles of 2 columns on Intel, 4 rows on AMD (both fp32, MKL), single rows in bf16 (oneDNN).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

TRIED_ROWS = (1, 2, 3, 4, 5, 6, 7, 9, 11, 14, 16, 48)
TRIED_WIDTH = 512
"""Wider weights behave as this wide; narrower ones are tried at their size, since libraries switch kernels on it."""


@dataclass(frozen=True)
class Form:
    """How the product is asked for: rows on the left or, transposed, on the right; padded to a multiple of `tile`."""

    rows_left: bool
    tile: int

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        m = x.shape[-2]
        if m % self.tile:
            x = F.pad(x, (0, 0, 0, self.tile - m % self.tile))
        if self.rows_left:
            y = torch.matmul(x, weight.transpose(-1, -2))
        else:
            y = torch.matmul(weight, x.transpose(-1, -2).contiguous()).transpose(-1, -2)
        return y[..., :m, :]


class RowByRow:
    """The last resort: a product of its own for every row."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.matmul(row, weight.transpose(-1, -2)) for row in x.split(1, -2)], -2)


FORMS = [Form(rows_left, tile) for tile in (1, 2, 4, 8, 16) for rows_left in (True, False)]


def row_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply rows by a weight, or rows of a batch by the weights of that batch.

    Args: x [m, K] or [B, m, K]; weight [N, K] or [B, N, K] in x's dtype.   Returns: [m, N] or [B, m, N].
    """
    if x.device.type != "cpu":
        return torch.matmul(x, weight.transpose(-1, -2))
    shape = min(weight.shape[-2], TRIED_WIDTH), min(weight.shape[-1], TRIED_WIDTH)
    by_row = weight.stride(-1) == 1
    return invariant_form(shape, x.dtype, x.dim() == 3, by_row, torch.get_num_threads())(x, weight)


@cache
def invariant_form(
    shape: tuple[int, int], dtype: torch.dtype, batched: bool, by_row: bool, num_threads: int
) -> Form | RowByRow:
    """The cheapest form that gives every row the same bits in every company.

    Args: shape [N, K] of the weight; batched: three products at once stand for any number; by_row: the weight is stored
        row by row, otherwise column by column; num_threads: the libraries divide the work by it.
    """
    N, K = shape
    weight = cancelling(3 * N, K, -1.0).view(3, N, K).to(dtype)
    weight = weight if by_row else weight.transpose(1, 2).contiguous().transpose(1, 2)
    x = cancelling(3 * TRIED_ROWS[-1], K, 1.0).view(3, -1, K).to(dtype)
    x, weight = (x, weight) if batched else (x[0], weight[0])
    return next((form for form in FORMS if _keeps_bits(form, x, weight)), RowByRow())


def cancelling(rows: int, K: int, sign: float) -> torch.Tensor:
    """Random rows [rows, K] whose second half repeats the first, times `sign`, in a shuffled order of columns.

    The product of rows made with +1 and rows made with -1 is zero but for rounding, so it shows any change in the order
    of summation. Of ordinary numbers rounding to bf16 hides nearly all of them.
    """
    g = torch.Generator().manual_seed(K)
    order = torch.randperm(2 * (K // 2), generator=g)
    half = torch.randn(rows, K // 2, generator=g)
    both = torch.cat((half, sign * half), -1)[:, order]
    return torch.cat((both, torch.zeros(rows, K % 2)), -1)


def _keeps_bits(form: Form, x: torch.Tensor, weight: torch.Tensor) -> bool:
    whole = form(x, weight)
    lone = torch.cat([form(row, weight) for row in x.split(1, -2)], -2)
    return torch.equal(lone, whole) and all(
        torch.equal(form(x[..., :m, :], weight), whole[..., :m, :]) for m in TRIED_ROWS
    )
