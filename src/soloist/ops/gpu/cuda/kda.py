"""KDA of a round in CUDA C++, see kda.cu."""

from __future__ import annotations

import numpy as np
import torch

from soloist.ops.gpu import kda as triton_kda
from soloist.ops.gpu.cuda.linear import MOST_ROWS, lies_well
from soloist.ops.gpu.cuda.program import is_available, kernel
from soloist.ops.kda import kda_decode

DIM, VALUES, THREADS, GROUPS, PAST = 128, 16, 256, 8, 3


@kda_decode.impl("cuda", on="cuda")
def _kda_decode(
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
    (H, D), T, slots = bias.shape, projected.shape[0], states.shape[0]
    dtypes_fit = history.dtype == torch.bfloat16 and states.dtype == conv_weight.dtype == torch.float32
    sizes_fit = D == DIM and conv_weight.shape[1] == 4 and T <= MOST_ROWS
    if not (dtypes_fit and sizes_fit and lies_well(projected) and is_available(projected.device)):
        return triton_kda._kda_decode(projected, conv_weight, rate, bias, lower_bound, history, states, start, live, rows)
    assert T < slots and states.is_contiguous() and history.is_contiguous(), (T, slots)
    o = torch.empty((T, H, D), dtype=torch.float32, device=projected.device)
    raw_bytes = (3 * DIM + VALUES) * 2  # bf16 inputs of a row
    row_bytes = 3 * raw_bytes + GROUPS * VALUES * 4  # with what is made of them in fp32, and lane groups' sums
    function = kernel("kda", "kda", PAST * raw_bytes + MOST_ROWS * row_bytes, projected.device, H=H)
    function(
        (H, D // VALUES), THREADS, PAST * raw_bytes + T * row_bytes, projected, conv_weight, rate, bias, history, states, start,
        live, rows, o, np.int32(T), np.int32(history.shape[0]), np.int32(slots), np.int64(projected.stride(0)),
        np.float32(lower_bound), np.float32(D**-0.5),
    )  # fmt: skip
    return o
