"""The mixture of experts in CUDA C++, see moe.cu. What does not suit it is left to the Triton kernels."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from soloist.ops.gpu import moe as triton_moe
from soloist.ops.gpu.cuda.linear import (
    MOST_SHARED,
    OUTS,
    ROWS,
    THREADS,
    WARPS,
    fits,
    lies_well,
    row_bytes,
    slot_bytes,
    slots,
    suits,
    sums_bytes,
    tile_rows,
)
from soloist.ops.gpu.cuda.program import Kernel, kernel
from soloist.ops.gpu.launch import next_power_of_2, num_sms
from soloist.ops.moe import RoutedExperts, Routing, SharedExpert, moe
from soloist.ops.norm_linear import Norm

LOGITS = 8
MOST_EXPERTS = 1024
SHARED_RING, UP_RING, DOWN_RING = 52 * 1024, 70 * 1024, 116 * 1024
"""Bytes of weights on their way: each kernel with the next one fits a multiprocessor."""


def choice_suits(routing: Routing) -> bool:
    """A warp chooses for a row: its lanes share experts and groups out evenly."""
    E = routing.weight.shape[0]
    if E > MOST_EXPERTS or (E >= 32 and E % 32) or E % routing.num_groups:
        return False
    size, per_lane = E // routing.num_groups, max(1, E // 32)
    if routing.num_groups == 1:
        return True
    return size % per_lane == 0 and size // per_lane == next_power_of_2(size // per_lane) and size > 1


def all_suit(residual: torch.Tensor, routing: Routing, experts: RoutedExperts, shared: SharedExpert | None) -> bool:
    """All experts here, as wide as the shared one, and of sizes that the kernels divide."""
    held, D, F = experts.down.shape
    alike = shared is None or (isinstance(shared.down, torch.Tensor) and shared.down.shape[1] == F)
    return (
        suits(residual, routing_rows(experts)) and fits(D) and suits(residual, experts.down.view(-1, F)) and alike
        and held == routing.weight.shape[0] and choice_suits(routing) and routing.weight.is_contiguous()
    )  # fmt: skip


def routing_rows(experts: RoutedExperts) -> torch.Tensor:
    return experts.gate_up.view(-1, experts.gate_up.shape[2])


@moe.impl("cuda", on="cuda")
def _moe(
    residual: torch.Tensor,
    branch: torch.Tensor,
    norm: Norm,
    routing: Routing,
    experts: RoutedExperts,
    shared: SharedExpert | None,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not (all_suit(residual, routing, experts, shared) and lies_well(residual, branch) and residual.is_contiguous()):
        return triton_moe._moe(residual, branch, norm, routing, experts, shared, rows)
    branch = branch.contiguous()
    (T, D), device, E, F = residual.shape, residual.device, routing.weight.shape[0], experts.down.shape[2]
    new = partial(torch.empty, device=device)
    logits, scales = new(T, E, dtype=torch.float32), new(T, dtype=torch.float32)
    stream, y, shared_h = torch.empty_like(residual), torch.empty_like(residual), residual.new_empty(T, F)
    h = residual.new_empty(min(E, T * routing.top_k), T, F)
    halves, sms = -(-T // ROWS), num_sms(device)
    down_rows = tile_rows(D, sms)
    entry = partial(entries, routing, D, F, shared is not None, halves, down_rows, device)
    limit, count = np.float32(0.0 if shared is None else shared.limit), np.int32(T)
    x_bytes = sums_bytes(halves) + halves * ROWS * 4 + T * row_bytes(D)
    depth = slots(OUTS, x_bytes, SHARED_RING)
    entry("router")(
        (-(-E // LOGITS) + (F // 8 if shared else 0),), THREADS, depth * slot_bytes(OUTS) + x_bytes, residual, branch, norm[0],
        routing.weight, None if shared is None else shared.gate_up, stream, scales, logits, shared_h, np.int32(depth), count,
        np.float32(norm[1]), limit,
    )  # fmt: skip
    depth = slots(OUTS, x_bytes, UP_RING)
    entry("up")(
        (min(F // 8 * routing.top_k, sms),), THREADS, depth * slot_bytes(OUTS) + x_bytes, stream, norm[0], scales, logits,
        routing.bias, rows, experts.gate_up, h, np.int32(depth), count, np.float32(experts.limit),
    )  # fmt: skip
    own_bytes = WARPS * halves * ROWS * OUTS * 4 + halves * ROWS * E * 4
    depth = slots(down_rows, own_bytes, DOWN_RING)
    entry("down")(
        (-(-D // down_rows),), THREADS, depth * slot_bytes(down_rows) + own_bytes, logits, routing.bias, rows, experts.down, h,
        None if shared is None else shared.down, shared_h, y, np.int32(depth), count,
    )  # fmt: skip
    return y, stream


def entries(
    routing: Routing, D: int, F: int, shared: bool, halves: int, down_rows: int, device: torch.device, name: str
) -> Kernel:
    """One of the three kernels for these sizes."""
    return kernel(
        "moe", name, MOST_SHARED, device, D=D, F=F, E=routing.weight.shape[0], GROUPS=routing.num_groups,
        TOP_GROUPS=routing.top_groups, TOP_K=routing.top_k, SIGMOID=routing.score == "sigmoid",
        HAS_BIAS=routing.bias is not None, NORMALISE=routing.normalise, SCALING=float(routing.scaling), SHARED=shared,
        WIDE_ROUTER=routing.weight.dtype == torch.float32, HALVES=halves, DOWN_ROWS=down_rows,
    )  # fmt: skip
