"""A round's mixture of experts in three kernels: router and shared expert, routed experts up, all experts down.

No sort on the host, no atomics: every program repeats the choice of experts from the router's logits, which is cheaper
than a kernel boundary. The distinct experts of all rows, in ascending order, are the items of the second and third
kernel; each is read once, whatever number of rows chose it. Rows that did not choose an item have weight 0 there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from soloist.ops.gpu.launch import depend, launch, next_power_of_2
from soloist.ops.gpu.linear import (
    OUTS,
    ROWS,
    WARPS,
    add_stream,
    few,
    load_columns,
    load_rows,
    load_slab,
    out_rows,
    product,
    store_rows,
    swiglu_pairs,
)
from soloist.ops.gpu.moe_experts import moe_of_many
from soloist.ops.moe import RoutedExperts, Routing, SharedExpert, moe
from soloist.ops.norm_linear import Norm


@triton.jit
def router_rows(
    tile, residual_ptr, branch_ptr, norm_ptr, w_ptr, stream_ptr, scale_ptr, logits_ptr, T, E, D, eps,
    HALVES: tl.constexpr, SLABS: tl.constexpr, WK: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """16 router logits of every row, fp32; the first tile also writes the new residual stream and its norm's scale [T]."""
    rows = tile * OUTS + tl.arange(0, OUTS)
    w0 = load_slab(w_ptr, rows, 0, D, WK, B, B, E)
    depend(PDL)
    for half in tl.static_range(HALVES):
        t0 = half * ROWS
        acc = tl.zeros((WK, OUTS, ROWS), tl.float32)
        squares = tl.zeros((WK, B, ROWS), tl.float32)
        for s in tl.static_range(SLABS):
            w = w0 if s == 0 else load_slab(w_ptr, rows, s, D, WK, B, B, E)
            stream, x = add_stream(residual_ptr, branch_ptr, norm_ptr, D, s, t0, T, D, True, WK, B)
            squares += stream * stream
            if tile == 0:
                store_rows(stream_ptr, stream, s, t0, T, D, WK, B)
            if w_ptr.dtype.element_ty == tl.float32:
                acc = tl.dot(w, x, acc, input_precision="tf32x3")
            else:
                acc = product(w, x, acc)
        scale = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / D + eps)
        t = t0 + tl.arange(0, ROWS)
        inside = (rows[:, None] < E) & (t[None, :] < T)
        tl.store(logits_ptr + t[None, :] * E + rows[:, None], tl.sum(acc, 0) * scale[None, :], mask=inside)
        if tile == 0:
            tl.store(scale_ptr + t, scale, mask=t < T)


@triton.jit
def shared_rows(
    unit, residual_ptr, branch_ptr, norm_ptr, w_ptr, h_ptr, T, F, D, eps, LIMIT: tl.constexpr,
    HALVES: tl.constexpr, SLABS: tl.constexpr, WK: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """8 hidden values of the shared expert for every row."""
    rows = out_rows(unit, 2 * F, True)
    out = unit * (OUTS // 2) + tl.arange(0, OUTS // 2)
    w0 = load_slab(w_ptr, rows, 0, D, WK, B, B, 2 * F)
    w1 = load_slab(w_ptr, rows, 1, D, WK, B, B, 2 * F) if SLABS > 1 else w0
    w2 = load_slab(w_ptr, rows, 2, D, WK, B, B, 2 * F) if SLABS > 2 else w0
    depend(PDL)
    for half in tl.static_range(HALVES):
        t0 = half * ROWS
        acc = tl.zeros((WK, OUTS, ROWS), tl.float32)
        squares = tl.zeros((WK, B, ROWS), tl.float32)
        for s in tl.static_range(SLABS):
            if s == 0:
                w = w0
            elif s == 1:
                w = w1
            elif s == 2:
                w = w2
            else:
                w = load_slab(w_ptr, rows, s, D, WK, B, B, 2 * F)
            stream, x = add_stream(residual_ptr, branch_ptr, norm_ptr, D, s, t0, T, D, True, WK, B)
            squares += stream * stream
            acc = product(w, x, acc)
        scale = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / D + eps)
        h = swiglu_pairs(tl.sum(acc, 0) * scale[None, :], LIMIT)
        t = t0 + tl.arange(0, ROWS)
        inside = (out[:, None] < F) & (t[None, :] < T)
        tl.store(h_ptr + t[None, :] * F + out[:, None], h.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def router_kernel(
    residual_ptr, branch_ptr, norm_ptr, router_ptr, shared_ptr, stream_ptr, scale_ptr, logits_ptr, h_ptr, T, E, F, D, eps,
    ROUTER_TILES: tl.constexpr, LIMIT: tl.constexpr, HALVES: tl.constexpr, SLABS: tl.constexpr, WK: tl.constexpr,
    B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs below ROUTER_TILES serve the router, the others the shared expert where there is one."""
    pid = tl.program_id(0)
    if pid < ROUTER_TILES:
        router_rows(pid, residual_ptr, branch_ptr, norm_ptr, router_ptr, stream_ptr, scale_ptr, logits_ptr, T, E, D, eps,
                    HALVES, SLABS, WK, B, PDL)  # fmt: skip
    if shared_ptr is not None:
        if pid >= ROUTER_TILES:
            shared_rows(pid - ROUTER_TILES, residual_ptr, branch_ptr, norm_ptr, shared_ptr, h_ptr, T, F, D, eps, LIMIT,
                        HALVES, SLABS, WK, B, PDL)  # fmt: skip


@triton.jit
def counted(rows_ptr, T):
    """How many rows of the window count: all of them, or the first that the round found worth verifying."""
    return T if rows_ptr is None else tl.minimum(tl.load(rows_ptr).to(tl.int32), T)


@triton.jit
def sortable(x):
    """Integers in the order of the numbers x [...] fp32."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def choose(
    logits_ptr, bias_ptr, t0, T, E: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, NORMALISE: tl.constexpr, SCALING: tl.constexpr, GP: tl.constexpr,
    SP: tl.constexpr,
):  # fmt: skip
    """`route` for rows t0 .. t0 + 7 over padded slots: (chosen [8, GP * SP] int32 0 or 1, weight [8, GP * SP], 0 elsewhere).

    A warp serves a row: the best is taken TOP_K times, of equal ones the first, by integer reductions inside the warp.
    """
    SIZE: tl.constexpr = E // GROUPS
    LEAST: tl.constexpr = -2147483648
    t = t0 + tl.arange(0, ROWS)
    group = tl.arange(0, GP)
    member = tl.arange(0, SP)
    expert = group[:, None] * SIZE + member[None, :]
    real = (group[:, None] < GROUPS) & (member[None, :] < SIZE)
    here = (t[:, None, None] < T) & real[None, :, :]
    logit = tl.load(logits_ptr + t[:, None, None] * E + expert[None, :, :], mask=here, other=float("-inf"), cache_modifier=".cg")
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        score = tl.exp(logit - tl.max(tl.max(logit, 2), 1)[:, None, None])
        score = score / tl.sum(tl.sum(score, 2), 1)[:, None, None]
    choice = score
    if HAS_BIAS:
        choice += tl.load(bias_ptr + expert, mask=real, other=0.0)[None, :, :]
    if GROUPS > 1:
        choice = tl.where(here, choice, float("-inf"))
        best = tl.max(choice, 2)
        first = tl.min(tl.where(choice == best[:, :, None], member[None, None, :], SP), 2)
        second = tl.max(tl.where(member[None, None, :] == first[:, :, None], float("-inf"), choice), 2)
        rank = tl.where(group[None, :] < GROUPS, sortable(best + second), LEAST)
        kept = tl.zeros((ROWS, GP), tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            lead = tl.min(tl.where(rank == tl.max(rank, 1)[:, None], group[None, :], GP), 1)
            kept = tl.where(group[None, :] == lead[:, None], 1, kept)
            rank = tl.where(group[None, :] == lead[:, None], LEAST, rank)
        here = here & (kept > 0)[:, :, None]
    slot = tl.arange(0, GP * SP)
    rank = tl.reshape(tl.where(here, sortable(choice), LEAST), (ROWS, GP * SP))
    chosen = tl.zeros((ROWS, GP * SP), tl.int32)
    for _ in tl.static_range(TOP_K):
        top = tl.max(rank, 1)
        lead = tl.min(tl.where(rank == top[:, None], slot[None, :], GP * SP), 1)
        mine = (slot[None, :] == lead[:, None]) & (top > LEAST)[:, None]
        chosen = tl.where(mine, 1, chosen)
        rank = tl.where(mine, LEAST, rank)
    weight = tl.where(chosen > 0, tl.reshape(score, (ROWS, GP * SP)), 0.0)
    if NORMALISE:
        weight = weight / (tl.sum(weight, 1) + 1e-20)[:, None]
    return chosen, weight * SCALING


@triton.jit
def slot_experts(E: tl.constexpr, GROUPS: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr):
    """The expert of each padded slot: [GP * SP]."""
    slot = tl.arange(0, GP * SP)
    return (slot // SP) * (E // GROUPS) + slot % SP


@triton.jit(do_not_specialize=["T"])
def up_kernel(
    stream_ptr, norm_ptr, scale_ptr, logits_ptr, bias_ptr, rows_ptr, w_ptr, h_ptr, T, F, D, E: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr,
    NORMALISE: tl.constexpr, SCALING: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr, LIMIT: tl.constexpr,
    HALVES: tl.constexpr, SLABS: tl.constexpr, WK: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (unit of 8 hidden values, first item): h [items, T, F] of every TOP_K-th item."""
    unit = tl.program_id(0)
    rows = out_rows(unit, 2 * F, True)
    out = unit * (OUTS // 2) + tl.arange(0, OUTS // 2)
    depend(PDL)
    count = counted(rows_ptr, T)
    chosen, _ = choose(logits_ptr, bias_ptr, 0, count, E, GROUPS, TOP_GROUPS, TOP_K, SIGMOID, HAS_BIAS, NORMALISE, SCALING, GP,
                       SP)  # fmt: skip
    used = tl.max(chosen, 0)
    if HALVES > 1:
        chosen, _ = choose(logits_ptr, bias_ptr, ROWS, count, E, GROUPS, TOP_GROUPS, TOP_K, SIGMOID, HAS_BIAS, NORMALISE, SCALING,
                           GP, SP)  # fmt: skip
        used = used | tl.max(chosen, 0)
    item_of = tl.cumsum(used, 0) - 1
    experts = slot_experts(E, GROUPS, GP, SP)
    for item in range(tl.program_id(1), tl.sum(used, 0), TOP_K):
        expert = tl.sum(tl.where((used > 0) & (item_of == item), experts, 0), 0)
        w_expert = w_ptr + expert.to(tl.int64) * (2 * F) * D
        w0 = load_slab(w_expert, rows, 0, D, WK, B, B, 2 * F)
        w1 = load_slab(w_expert, rows, 1, D, WK, B, B, 2 * F) if SLABS > 1 else w0
        w2 = load_slab(w_expert, rows, 2, D, WK, B, B, 2 * F) if SLABS > 2 else w0
        for half in tl.static_range(HALVES):
            t0 = half * ROWS
            acc = tl.zeros((WK, OUTS, ROWS), tl.float32)
            for s in tl.static_range(SLABS):
                if s == 0:
                    w = w0
                elif s == 1:
                    w = w1
                elif s == 2:
                    w = w2
                else:
                    w = load_slab(w_expert, rows, s, D, WK, B, B, 2 * F)
                x = load_rows(stream_ptr, D, s, t0, T, D, WK, B, B) * load_columns(norm_ptr, s, D, WK, B, B)
                acc = product(w, x, acc)
            t = t0 + tl.arange(0, ROWS)
            scale = tl.load(scale_ptr + t, mask=t < T, other=0.0)
            h = swiglu_pairs(tl.sum(acc, 0) * scale[None, :], LIMIT)
            inside = (out[:, None] < F) & (t[None, :] < T)
            at = h_ptr + (item * T + t[None, :]) * F + out[:, None]
            tl.store(at, h.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_item(w_ptr, items_ptr, rows, item, count, F, D, WK: tl.constexpr, B: tl.constexpr, GROUP: tl.constexpr):
    """Down weights [warps, 16, B] of an item; zeros beyond the last."""
    expert = tl.load(items_ptr + item, mask=item < count, other=0)
    return load_slab(w_ptr + expert.to(tl.int64) * D * F, rows, 0, F, WK, B, GROUP, tl.where(item < count, D, 0))


@triton.jit
def add_item(
    acc, w, h_ptr, shares_ptr, item, count, t0, T, F, WK: tl.constexpr, B: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """acc plus the item's product, each row times its weight."""
    share = tl.load(shares_ptr + item * (2 * ROWS) + t0 + tl.arange(0, ROWS), mask=item < count, other=0.0)
    x = load_rows(h_ptr + item * T * F, F, 0, t0, tl.where(item < count, T, 0), F, WK, B, GROUP)
    return acc + product(w, x, tl.zeros_like(acc)) * share[None, None, :]


@triton.jit(do_not_specialize=["T"])
def down_kernel(
    logits_ptr, bias_ptr, rows_ptr, w_ptr, h_ptr, shared_w_ptr, shared_h_ptr, y_ptr, items_ptr, shares_ptr, T, F, SHARED_F, D,
    E: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr, SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr, NORMALISE: tl.constexpr, SCALING: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr,
    HAS_SHARED: tl.constexpr, HALVES: tl.constexpr, WK: tl.constexpr, B: tl.constexpr, GROUP: tl.constexpr,
    SHARED_B: tl.constexpr, SHARED_GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """16 outputs over all experts in ascending order.

    The logits are two kernels old, so they may be read before `depend`: every kernel triggers after its own wait.
    A program writes the expert of every item and the rows' weights [items, 16] to its own table, and reads them as it goes.
    """
    rows = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    items_ptr += tl.program_id(0) * GP * SP
    shares_ptr += tl.program_id(0) * GP * SP * 2 * ROWS
    if HAS_SHARED:
        shared_w = load_slab(shared_w_ptr, rows, 0, SHARED_F, WK, SHARED_B, SHARED_GROUP, D)
    live = counted(rows_ptr, T)
    chosen, weight = choose(logits_ptr, bias_ptr, 0, live, E, GROUPS, TOP_GROUPS, TOP_K, SIGMOID, HAS_BIAS, NORMALISE, SCALING,
                            GP, SP)  # fmt: skip
    used = tl.max(chosen, 0)
    if HALVES > 1:
        chosen, weight1 = choose(logits_ptr, bias_ptr, ROWS, live, E, GROUPS, TOP_GROUPS, TOP_K, SIGMOID, HAS_BIAS, NORMALISE,
                                 SCALING, GP, SP)  # fmt: skip
        used = used | tl.max(chosen, 0)
    count = tl.sum(used, 0)
    item_of = tl.cumsum(used, 0) - 1
    tl.store(items_ptr + item_of, slot_experts(E, GROUPS, GP, SP), mask=used > 0)
    row = tl.arange(0, ROWS)
    at = shares_ptr + item_of[None, :] * (2 * ROWS) + row[:, None]
    tl.store(at, weight, mask=used[None, :] > 0)
    if HALVES > 1:
        tl.store(at + ROWS, weight1, mask=used[None, :] > 0)
    tl.debug_barrier()
    a = load_item(w_ptr, items_ptr, rows, 0, count, F, D, WK, B, GROUP)
    b = load_item(w_ptr, items_ptr, rows, 1, count, F, D, WK, B, GROUP)
    c = load_item(w_ptr, items_ptr, rows, 2, count, F, D, WK, B, GROUP)
    d = load_item(w_ptr, items_ptr, rows, 3, count, F, D, WK, B, GROUP)
    depend(PDL)
    acc0 = tl.zeros((WK, OUTS, ROWS), tl.float32)
    acc1 = tl.zeros((WK, OUTS, ROWS), tl.float32)
    if HAS_SHARED:
        acc0 = product(shared_w, load_rows(shared_h_ptr, SHARED_F, 0, 0, T, SHARED_F, WK, SHARED_B, SHARED_GROUP), acc0)
        if HALVES > 1:
            acc1 = product(shared_w, load_rows(shared_h_ptr, SHARED_F, 0, ROWS, T, SHARED_F, WK, SHARED_B, SHARED_GROUP), acc1)
    for item in range(0, count, 4):
        next_a = load_item(w_ptr, items_ptr, rows, item + 4, count, F, D, WK, B, GROUP)
        next_b = load_item(w_ptr, items_ptr, rows, item + 5, count, F, D, WK, B, GROUP)
        next_c = load_item(w_ptr, items_ptr, rows, item + 6, count, F, D, WK, B, GROUP)
        next_d = load_item(w_ptr, items_ptr, rows, item + 7, count, F, D, WK, B, GROUP)
        acc0 = add_item(acc0, a, h_ptr, shares_ptr, item, count, 0, T, F, WK, B, GROUP)
        acc0 = add_item(acc0, b, h_ptr, shares_ptr, item + 1, count, 0, T, F, WK, B, GROUP)
        acc0 = add_item(acc0, c, h_ptr, shares_ptr, item + 2, count, 0, T, F, WK, B, GROUP)
        acc0 = add_item(acc0, d, h_ptr, shares_ptr, item + 3, count, 0, T, F, WK, B, GROUP)
        if HALVES > 1:
            acc1 = add_item(acc1, a, h_ptr, shares_ptr, item, count, ROWS, T, F, WK, B, GROUP)
            acc1 = add_item(acc1, b, h_ptr, shares_ptr, item + 1, count, ROWS, T, F, WK, B, GROUP)
            acc1 = add_item(acc1, c, h_ptr, shares_ptr, item + 2, count, ROWS, T, F, WK, B, GROUP)
            acc1 = add_item(acc1, d, h_ptr, shares_ptr, item + 3, count, ROWS, T, F, WK, B, GROUP)
        a, b, c, d = next_a, next_b, next_c, next_d
    for half in tl.static_range(HALVES):
        y = tl.sum(acc0 if half == 0 else acc1, 0)
        t = half * ROWS + tl.arange(0, ROWS)
        inside = (rows[:, None] < D) & (t[None, :] < T)
        tl.store(y_ptr + t[None, :] * D + rows[:, None], y.to(y_ptr.dtype.element_ty), mask=inside)


def columns_a_warp(width: int) -> int:
    """How many of an expert's hidden values a warp multiplies in the down product."""
    return triton.cdiv(width, WARPS)


@moe.impl("triton", on="cuda")
def _moe(
    residual: torch.Tensor,
    branch: torch.Tensor,
    norm: Norm,
    routing: Routing,
    experts: RoutedExperts,
    shared: SharedExpert | None,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not few(residual) or experts.down.shape[0] < routing.weight.shape[0]:
        return moe_of_many(residual, branch, norm, routing, experts, shared)
    residual, branch = residual.contiguous(), branch.contiguous()
    (T, D), device, dtype = residual.shape, residual.device, residual.dtype
    E, F = routing.weight.shape[0], experts.down.shape[2]
    shared_width = 0 if shared is None else shared.down.shape[1]  # type: ignore[union-attr]

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    logits, scale = empty(T, E, dtype=torch.float32), empty(T, dtype=torch.float32)
    stream, y, shared_h = empty(T, D), empty(T, D), empty(T, shared_width)
    h = empty(min(E, T * routing.top_k), T, F)
    columns = 64 if D > 256 else 32
    tiling = {"HALVES": triton.cdiv(T, ROWS.value), "WK": WARPS, "num_warps": WARPS, "num_stages": 1,
              "device": device}
    slabs = {"SLABS": triton.cdiv(D, WARPS * columns), "B": columns}
    router_tiles, half = triton.cdiv(E, OUTS.value), OUTS.value // 2
    launch(
        router_kernel, (router_tiles + triton.cdiv(shared_width, half),), residual, branch, norm[0], routing.weight,
        None if shared is None else shared.gate_up, stream, scale, logits, shared_h, T, E, shared_width, D, norm[1],
        ROUTER_TILES=router_tiles, LIMIT=0.0 if shared is None else shared.limit, **slabs, **tiling,
    )  # fmt: skip
    size = E // routing.num_groups
    law: dict[str, Any] = {"GROUPS": routing.num_groups, "TOP_GROUPS": routing.top_groups, "TOP_K": routing.top_k,
           "SIGMOID": routing.score == "sigmoid", "HAS_BIAS": routing.bias is not None, "NORMALISE": routing.normalise,
           "SCALING": routing.scaling, "GP": next_power_of_2(routing.num_groups), "SP": next_power_of_2(size)}  # fmt: skip
    launch(
        up_kernel, (triton.cdiv(F, half), routing.top_k), stream, norm[0], scale, logits, routing.bias, rows, experts.gate_up, h,
        T, F, D, E=E, LIMIT=experts.limit, **law, **slabs, **tiling,
    )  # fmt: skip
    group, shared_group = columns_a_warp(F), columns_a_warp(max(shared_width, 1))
    programs, slots = triton.cdiv(D, OUTS.value), law["GP"] * law["SP"]
    items = empty(programs, slots, dtype=torch.int32)
    shares = empty(programs, slots, 2 * ROWS.value, dtype=torch.float32)
    launch(
        down_kernel, (programs,), logits, routing.bias, rows, experts.down, h, None if shared is None else shared.down, shared_h,
        y, items, shares, T, F, shared_width, D, E=E, HAS_SHARED=shared is not None,
        B=max(16, next_power_of_2(group)), GROUP=group, SHARED_B=max(16, next_power_of_2(shared_group)),
        SHARED_GROUP=shared_group, **law, **tiling,
    )  # fmt: skip
    return y, stream
