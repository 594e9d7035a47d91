"""Skinny products on the tensor cores: 1..16 rows times a weight that is read once, with what stands before and after.

A program owns 16 outputs and its warps share the inputs out: warp w multiplies its own columns of every slab, one
product of [16, B] by [B, 8] rows, and the warps' sums are added at the end. Weights are the left operand, so eight rows
cost what one costs. The first slabs are loaded before `depend`. Norms need no pass of their own: the weight is
multiplied by the unnormed row, and its scale, computed beside, is applied to the sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.gpu.launch import depend, launch, next_power_of_2
from soloist.ops.gpu.row_steps import gated_norm
from soloist.ops.linear import MANY_ROWS, Weight, linear, linear_fp32
from soloist.ops.norm_linear import add_norm_gate_up, add_norm_linear, gated_norm_linear

ROWS = tl.constexpr(8)
"""Window rows of one product, the narrowest of the tensor cores."""
OUTS = tl.constexpr(16)
WARPS = 8


@triton.jit
def load_slab(w_ptr, rows, s, K, WK: tl.constexpr, B: tl.constexpr, GROUP: tl.constexpr, N):
    """Weights [warps, 16, B] of slab s: warp w holds the columns (s * warps + w) * GROUP + 0 .. GROUP - 1."""
    part = s * WK + tl.arange(0, WK)
    b = tl.arange(0, B)
    column = part[:, None, None] * GROUP + b[None, None, :]
    inside = (b[None, None, :] < GROUP) & (column < K) & (rows[None, :, None] < N)
    return tl.load(w_ptr + rows[None, :, None].to(tl.int64) * K + column, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def load_rows(x_ptr, stride, s, t0, T, K, WK: tl.constexpr, B: tl.constexpr, GROUP: tl.constexpr):
    """Inputs [warps, B, 8] of slab s for the window rows t0 .. t0 + 7, fp32; 0 beyond T."""
    part = s * WK + tl.arange(0, WK)
    b = tl.arange(0, B)
    t = t0 + tl.arange(0, ROWS)
    column = part[:, None, None] * GROUP + b[None, :, None]
    inside = (b[None, :, None] < GROUP) & (column < K) & (t[None, None, :] < T)
    return tl.load(x_ptr + t[None, None, :] * stride + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_columns(v_ptr, s, K, WK: tl.constexpr, B: tl.constexpr, GROUP: tl.constexpr):
    """A vector's entries [warps, B, 1] of slab s, fp32."""
    part = s * WK + tl.arange(0, WK)
    b = tl.arange(0, B)
    column = part[:, None] * GROUP + b[None, :]
    inside = (b[None, :] < GROUP) & (column < K)
    return tl.load(v_ptr + column, mask=inside, other=0.0).to(tl.float32)[:, :, None]


@triton.jit
def add_stream(
    residual_ptr, branch_ptr, norm_ptr, stride, s, t0, T, K, HAS_BRANCH: tl.constexpr, WK: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """The residual stream after the branch, rounded as it is stored, and the same times the norm's weight."""
    stream = load_rows(residual_ptr, stride, s, t0, T, K, WK, B, B)
    if HAS_BRANCH:
        stream += load_rows(branch_ptr, K, s, t0, T, K, WK, B, B)
        stream = stream.to(residual_ptr.dtype.element_ty).to(tl.float32)
    return stream, stream * load_columns(norm_ptr, s, K, WK, B, B)


@triton.jit
def store_rows(y_ptr, value, s, t0, T, K, WK: tl.constexpr, B: tl.constexpr):
    part = s * WK + tl.arange(0, WK)
    column = part[:, None, None] * B + tl.arange(0, B)[None, :, None]
    t = t0 + tl.arange(0, ROWS)[None, None, :]
    tl.store(y_ptr + t * K + column, value.to(y_ptr.dtype.element_ty), mask=(column < K) & (t < T))


@triton.jit
def product(w, x, acc):
    """acc + w x in fp32: w [warps, 16, B], x [warps, B, 8]."""
    return tl.dot(w, x.to(w.dtype), acc, input_precision="ieee")


@triton.jit
def swiglu_pairs(y, LIMIT: tl.constexpr):
    """SiLU(gate) * up of y [16, 8] whose rows are gate, up, gate, up, ...: [8, 8]."""
    gate, up = tl.split(tl.permute(tl.reshape(y, (OUTS // 2, 2, ROWS)), (0, 2, 1)))
    gate = gate / (1.0 + tl.exp(-gate))
    if LIMIT > 0.0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return gate * up


@triton.jit
def out_rows(first, N, PAIRS: tl.constexpr):
    """The 16 weight rows of a program: in order, or one gate and one up row by turns, N being twice the width."""
    i = tl.arange(0, OUTS)
    return first * (OUTS // 2) + i // 2 + (i % 2) * (N // 2) if PAIRS else first * OUTS + i


@triton.jit(do_not_specialize=["T"])
def linear_kernel(
    x_ptr, branch_ptr, norm_ptr, gate_ptr, w_ptr, bias_ptr, y_ptr, stream_ptr, T, N, K, x_stride, gate_stride, y_stride, eps,
    PROLOGUE: tl.constexpr, HAS_BRANCH: tl.constexpr, HAS_BIAS: tl.constexpr, PAIRS: tl.constexpr, LIMIT: tl.constexpr,
    HALVES: tl.constexpr, SLABS: tl.constexpr, WK: tl.constexpr, B: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """PROLOGUE: plain | norm (x is the residual stream) | gated (x is a head-wise output, gate its gate)."""
    first = tl.program_id(0)
    rows = out_rows(first, N, PAIRS)
    limit = N
    if PAIRS:
        rows = tl.where(first * (OUTS // 2) + tl.arange(0, OUTS) // 2 < N // 2, rows, N)
    w0 = load_slab(w_ptr, rows, 0, K, WK, B, GROUP, limit)
    w1 = w0
    w2 = w0
    w3 = w0
    if SLABS > 1:
        w1 = load_slab(w_ptr, rows, 1, K, WK, B, GROUP, limit)
    if SLABS > 2:
        w2 = load_slab(w_ptr, rows, 2, K, WK, B, GROUP, limit)
    if SLABS > 3:
        w3 = load_slab(w_ptr, rows, 3, K, WK, B, GROUP, limit)
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
            elif s == 3:
                w = w3
            else:
                w = load_slab(w_ptr, rows, s, K, WK, B, GROUP, limit)
            if PROLOGUE == "norm":
                stream, x = add_stream(x_ptr, branch_ptr, norm_ptr, x_stride, s, t0, T, K, HAS_BRANCH, WK, B)
                squares += stream * stream
                if HAS_BRANCH and first == 0:
                    store_rows(stream_ptr, stream, s, t0, T, K, WK, B)
            elif PROLOGUE == "gated":
                o = load_rows(x_ptr, x_stride, s, t0, T, K, WK, B, GROUP)
                z = load_rows(gate_ptr, gate_stride, s, t0, T, K, WK, B, GROUP)
                weight = load_columns(norm_ptr, 0, GROUP, 1, B, GROUP)
                scale = tl.rsqrt(tl.sum(o * o, 1, keep_dims=True) / GROUP + eps)
                x = o * scale * weight / (1.0 + tl.exp(-z))
            else:
                x = load_rows(x_ptr, x_stride, s, t0, T, K, WK, B, GROUP)
            acc = product(w, x, acc)
        y = tl.sum(acc, 0)
        t = t0 + tl.arange(0, ROWS)
        if PROLOGUE == "norm":
            y = y * tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps)[None, :]
        if PAIRS:
            out = first * (OUTS // 2) + tl.arange(0, OUTS // 2)
            h = swiglu_pairs(y, LIMIT)
            inside = (out[:, None] < N // 2) & (t[None, :] < T)
            tl.store(y_ptr + t[None, :] * y_stride + out[:, None], h.to(y_ptr.dtype.element_ty), mask=inside)
        else:
            if HAS_BIAS:
                y += tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
            inside = (rows[:, None] < N) & (t[None, :] < T)
            tl.store(y_ptr + t[None, :] * y_stride + rows[:, None], y.to(y_ptr.dtype.element_ty), mask=inside)


def product_rows(T: int, N: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty [T, N] whose rows are a multiple of 16 values apart.

    Parts of them then have strides that Triton compiles for alike. It looks at whether a stride is a multiple of 16, and torch
    gives a window of one row another stride than one of several: two kernels, whose bits may differ.
    """
    return torch.empty((T, -(-N // 16) * 16), dtype=dtype, device=device)[:, :N]


def run(
    prologue: str, x: torch.Tensor, branch: torch.Tensor | None, norm: torch.Tensor | None, gate: torch.Tensor | None,
    weight: torch.Tensor, bias: torch.Tensor | None, eps: float, group: int = 0, pairs: bool = False, limit: float = 0.0,
    wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Launch `linear_kernel` for x [T, ...]; group: columns a warp takes from a slab, one head in the gated product.

    Returns: (y [T, N], or [T, N / 2] after the activation; the new residual stream, x itself where nothing was added).
    """
    T, (N, K) = x.shape[0], weight.shape
    branch = None if branch is None else branch.contiguous()
    group = group or (64 if K > 256 else 32)
    outs = N // 2 if pairs else N
    y = product_rows(T, outs, torch.float32 if wide else weight.dtype, x.device)
    stream = torch.empty((T, K), dtype=x.dtype, device=x.device) if branch is not None else x
    units = triton.cdiv(outs, OUTS.value // 2) if pairs else triton.cdiv(N, OUTS.value)
    launch(
        linear_kernel, (units,), x, branch, norm, gate, weight, bias, y, stream, T, N, K, x.stride(0),
        0 if gate is None else gate.stride(0), y.stride(0), eps, PROLOGUE=prologue, HAS_BRANCH=branch is not None,
        HAS_BIAS=bias is not None, PAIRS=pairs, LIMIT=limit, HALVES=triton.cdiv(T, ROWS.value),
        SLABS=triton.cdiv(K, WARPS * group), WK=WARPS, B=max(next_power_of_2(group), 16), GROUP=group,
        num_warps=WARPS, device=x.device,
    )  # fmt: skip
    return y, stream


def few(x: torch.Tensor) -> bool:
    """Whether a window is a round's. Longer ones are prefill, which the library's products serve best."""
    return x.shape[0] <= MANY_ROWS


@linear.impl("triton", on="cuda")
def _linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    assert isinstance(weight, torch.Tensor)
    if not few(x):
        return torch.nn.functional.linear(x, weight, bias)
    x = x if x.stride(-1) == 1 else x.contiguous()
    return run("plain", x, None, None, None, weight, bias, 0.0)[0]


@linear_fp32.impl("triton", on="cuda")
def _linear_fp32(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    assert isinstance(weight, torch.Tensor)
    if not few(x):
        return linear_fp32.reference(x, weight)
    return run("plain", x.contiguous(), None, None, None, weight, None, 0.0, wide=True)[0]


@add_norm_linear.impl("triton", on="cuda")
def _add_norm_linear(residual, branch, norm, weight, bias=None):
    if not few(residual):
        return add_norm_linear.reference(residual, branch, norm, weight, bias)
    return run("norm", residual, branch, norm[0], None, weight, bias, norm[1])


@add_norm_gate_up.impl("triton", on="cuda")
def _add_norm_gate_up(residual, branch, norm, weight, limit=0.0):
    if not few(residual):
        return add_norm_gate_up.reference(residual, branch, norm, weight, limit)
    return run("norm", residual, branch, norm[0], None, weight, None, norm[1], pairs=True, limit=limit)


@gated_norm_linear.impl("triton", on="cuda")
def _gated_norm_linear(o, gate, norm, weight):
    if not few(o):
        return torch.nn.functional.linear(gated_norm(o, gate, norm), weight)
    return run("gated", o.reshape(o.shape[0], -1), None, norm[0], gate, weight, None, norm[1], group=o.shape[2])[0]
