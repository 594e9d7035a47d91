"""A mixture of experts over a long window: rows sorted by expert on the device, two grouped products, a sum in fixed order.

A tile of rows belongs to one expert. Which tiles there are depends on the choice, so the grid holds as many as there can
be; every program looks its own up in the experts' offsets, and those behind the last return at once. Nothing is read on
the host, nothing is padded in memory, and there are no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.gpu.launch import depend, has_pdl, launch, next_power_of_2
from soloist.ops.linear import linear
from soloist.ops.moe import RoutedExperts, Routing, SharedExpert
from soloist.ops.moe_experts import moe_experts
from soloist.ops.norm_linear import Norm, normed
from soloist.ops.route import route
from soloist.ops.swiglu import swiglu

WIDE = {"BM": 128, "BN": 256, "num_warps": 8, "num_stages": 3}
"""Tiles of a GPU with 227 KB of shared memory and warp-group products (Hopper and later)."""
NARROW = {"BM": 128, "BN": 128, "num_warps": 8, "num_stages": 3}
FEW = {"BM": 32, "BN": 128, "num_warps": 4, "num_stages": 3}
"""For experts that see few rows: reading the weights takes the time."""
FEW_ROWS = 48
EXACT = {"BM": 32, "BN": 64, "num_warps": 4, "num_stages": 2}
"""fp32: three products for one, and twice the bytes."""


@triton.jit(do_not_specialize=["T"])
def logits_kernel(
    x_ptr, w_ptr, y_ptr, T, E, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program (block of rows, block of experts): the router's product y [T, E] in fp32, of x in any dtype."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    depend(PDL)
    x_at = x_ptr + tl.minimum(m, T - 1).to(tl.int64)[:, None] * K + k[None, :]
    w_at = w_ptr + tl.minimum(n, E - 1)[None, :] * K + k[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for done in range(0, K, BK):
        x = tl.load(x_at + done, mask=(k < K - done)[None, :], other=0.0).to(tl.float32)
        w = tl.load(w_at + done, mask=(k < K - done)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="tf32x3")
    tl.store(y_ptr + m.to(tl.int64)[:, None] * E + n[None, :], acc, mask=(m < T)[:, None] & (n < E)[None, :])


@triton.jit
def find_tile(offsets_ptr, tile, E, EP: tl.constexpr, BM: tl.constexpr):
    """(expert, first row, row behind the expert's last) of a tile; an expert >= E behind the last tile.

    Expert e has the sorted rows offsets[e] .. offsets[e + 1] - 1.
    """
    e = tl.arange(0, EP)
    begin = tl.load(offsets_ptr + e, mask=e < E, other=0)
    end = tl.load(offsets_ptr + e + 1, mask=e < E, other=0)
    tiles = tl.cdiv(end - begin, BM)
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum((upto <= tile).to(tl.int32), 0)
    first = tl.sum(tl.where(e == expert, begin + (tile - upto + tiles) * BM, 0), 0)
    return expert, first, tl.sum(tl.where(e == expert, end, 0), 0)


@triton.jit
def grouped_kernel(
    x_ptr, order_ptr, offsets_ptr, w_ptr, y_ptr, N, K, E, TOP_K: tl.constexpr, UP: tl.constexpr, LIMIT: tl.constexpr,
    EP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of an expert times its weight [N, K]; `order` [rows] tells which (token, slot) stands where.

    UP: x [T, K] by token, weight rows are taken gate, up, gate, up, ..., y [rows, N / 2] by sorted row, activated.
    Otherwise x [rows, K] by sorted row, y [rows, N] by (token, slot).
    """
    blocks = tl.cdiv(N, BN)
    depend(PDL)
    expert, first, end = find_tile(offsets_ptr, tl.program_id(0) // blocks, E, EP, BM)
    if expert >= E:
        return
    m = first + tl.arange(0, BM)
    inside = m < end
    place = tl.load(order_ptr + m, mask=inside, other=0)
    out = tl.program_id(0) % blocks * BN + tl.arange(0, BN)
    n = tl.minimum(out, N - 1)
    if UP:
        x_row = place // TOP_K
        n = n // 2 + (n % 2) * (N // 2)
    else:
        x_row = tl.where(inside, m, first).to(tl.int64)
    k = tl.arange(0, BK)
    x_at = x_ptr + x_row[:, None] * K + k[None, :]
    w_at = w_ptr + expert.to(tl.int64) * N * K + n[None, :] * K + k[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for done in range(0, K, BK):
        if EVEN:
            x = tl.load(x_at)
            w = tl.load(w_at)
        else:
            x = tl.load(x_at, mask=(k < K - done)[None, :], other=0.0)
            w = tl.load(w_at, mask=(k < K - done)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="tf32x3")
        x_at += BK
        w_at += BK
    if UP:
        gate, up = tl.split(tl.reshape(acc.to(y_ptr.dtype.element_ty).to(tl.float32), (BM, BN // 2, 2)))
        gate = gate / (1.0 + tl.exp(-gate))
        if LIMIT > 0.0:
            gate = tl.minimum(gate, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        width = N // 2
        hidden = tl.program_id(0) % blocks * (BN // 2) + tl.arange(0, BN // 2)
        at = y_ptr + m.to(tl.int64)[:, None] * width + hidden[None, :]
        tl.store(at, (gate * up).to(y_ptr.dtype.element_ty), mask=inside[:, None] & (hidden < width)[None, :])
    else:
        at = y_ptr + place[:, None] * N + out[None, :]
        tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=inside[:, None] & (out < N)[None, :])


@triton.jit
def combine_kernel(
    y_ptr, weights_ptr, experts_ptr, more_ptr, out_ptr, D, TOP_K: tl.constexpr, AP: tl.constexpr, BD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, block of channels): out [T, D] = more plus the weighted sum of y [T, TOP_K, D], experts ascending.

    What weighs nothing may not have been computed, and is not read.
    """
    t = tl.program_id(0).to(tl.int64)
    a = tl.arange(0, AP)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    depend(PDL)
    weights = tl.load(weights_ptr + t * TOP_K + a, mask=a < TOP_K, other=0.0)
    experts = tl.load(experts_ptr + t * TOP_K + a, mask=a < TOP_K, other=1 << 30)
    below = (experts[None, :] < experts[:, None]) | ((experts[None, :] == experts[:, None]) & (a[None, :] < a[:, None]))
    rank = tl.sum(below.to(tl.int32), 1)
    acc = tl.zeros((BD,), tl.float32)
    if more_ptr is not None:
        acc += tl.load(more_ptr + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    for i in tl.static_range(TOP_K):
        slot = tl.sum(tl.where(rank == i, a, 0), 0)
        weight = tl.sum(tl.where(rank == i, weights, 0.0), 0)
        y = tl.load(y_ptr + (t * TOP_K + slot) * D + d, mask=d < tl.where(weight == 0.0, 0, D), other=0.0)
        acc += y.to(tl.float32) * weight
    tl.store(out_ptr + t * D + d, acc.to(out_ptr.dtype.element_ty), mask=d < D)


def tiling(rows: int, x: torch.Tensor) -> dict[str, int]:
    """Tile sizes for so many rows an expert."""
    if x.element_size() > 2:
        return EXACT
    if rows < FEW_ROWS:
        return FEW
    return WIDE if has_pdl(x.device) else NARROW


def moe_of_many(
    residual: torch.Tensor,
    branch: torch.Tensor,
    norm: Norm,
    routing: Routing,
    experts: RoutedExperts,
    shared: SharedExpert | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`moe` for any number of rows, and where other ranks hold some of the experts."""
    x, residual = normed(residual, branch, norm)
    weights, chosen = route(router_logits(x, routing.weight), *routing[1:])
    held = experts.down.shape[0]
    if held < routing.weight.shape[0]:
        places = chosen - experts.first
        weights = weights.where((places >= 0) & (places < held), 0.0)
        chosen = places.clamp(0, held - 1)
    more = None if shared is None else linear(swiglu(linear(x, shared.gate_up), shared.limit), shared.down)
    return grouped(x, weights, chosen, experts.gate_up, experts.down, experts.limit, more), residual


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[T, E] fp32, multiplied in the weight's dtype."""
    if weight.dtype != torch.float32:
        return linear(x.to(weight.dtype), weight).float()
    (T, K), E = x.shape, weight.shape[0]
    logits = torch.empty((T, E), dtype=torch.float32, device=x.device)
    launch(logits_kernel, (triton.cdiv(T, 64), triton.cdiv(E, 128)), x, weight, logits, T, E, K, BM=64, BN=128, BK=32,
           device=x.device, num_warps=4, num_stages=3)  # fmt: skip
    return logits


@moe_experts.impl("grouped", on="cuda")
def grouped(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    limit: float = 0.0,
    more: torch.Tensor | None = None,
) -> torch.Tensor:
    """`moe_experts`, plus `more` [T, D]."""
    (T, D), A, (E, N, _), device = x.shape, weights.shape[1], gate_up.shape, x.device
    assert x.is_contiguous() and gate_up.is_contiguous() and down.is_contiguous() and weights.is_contiguous()
    # Slots that weigh nothing belong to experts elsewhere: they go behind the last expert here, where no tile begins.
    key = experts.masked_fill(weights == 0.0, E).to(torch.int16).flatten()
    key, order = key.sort(stable=True)
    offsets = torch.searchsorted(key, torch.arange(E + 1, dtype=key.dtype, device=device), out_int32=True)
    tiles = tiling(T * A // E, x)
    most = T * A // tiles["BM"] + min(E, T * A)
    BK = 64 if x.element_size() == 2 else 32

    def product(rows: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, up: bool) -> torch.Tensor:
        _, N, K = weight.shape
        launch(grouped_kernel, (most * triton.cdiv(N, tiles["BN"]),), rows, order, offsets, weight, y, N, K, E, TOP_K=A, UP=up,
               LIMIT=limit, EP=next_power_of_2(E), BK=BK, EVEN=K % BK == 0, device=device, **tiles)  # fmt: skip
        return y

    hidden = product(x, gate_up, x.new_empty(T * A, N // 2), True)
    y = product(hidden, down, x.new_empty(T * A, D), False)
    out, BD = torch.empty_like(x), min(2048, next_power_of_2(D))
    launch(combine_kernel, (T, triton.cdiv(D, BD)), y, weights, experts.contiguous(), more, out, D, TOP_K=A,
           AP=next_power_of_2(A), BD=BD, device=device, num_warps=4)  # fmt: skip
    return out
