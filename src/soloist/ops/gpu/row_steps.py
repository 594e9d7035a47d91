"""What a long window does row by row between its products, one kernel each: activation and gated norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.gpu.launch import depend, launch, next_power_of_2
from soloist.ops.norm_linear import Norm
from soloist.ops.swiglu import swiglu


@triton.jit
def swiglu_kernel(x_ptr, y_ptr, F, LIMIT: tl.constexpr, BF: tl.constexpr, PDL: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    depend(PDL)
    gate = tl.load(x_ptr + t * 2 * F + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + t * 2 * F + F + f, mask=f < F, other=0.0).to(tl.float32)
    gate = gate / (1.0 + tl.exp(-gate))
    if LIMIT > 0.0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    tl.store(y_ptr + t * F + f, (gate * up).to(y_ptr.dtype.element_ty), mask=f < F)


@swiglu.impl("triton", on="cuda")
def _swiglu(gate_up: torch.Tensor, limit: float = 0.0) -> torch.Tensor:
    gate_up = gate_up.contiguous()
    F = gate_up.shape[-1] // 2
    y = gate_up.new_empty(*gate_up.shape[:-1], F)
    rows, BF = gate_up.numel() // (2 * F), min(1024, next_power_of_2(F))
    launch(swiglu_kernel, (rows, triton.cdiv(F, BF)), gate_up, y, F, LIMIT=limit, BF=BF, device=y.device,
           num_warps=4)  # fmt: skip
    return y


@triton.jit
def gated_norm_kernel(
    o_ptr, gate_ptr, norm_ptr, y_ptr, gate_stride, H, D, eps, BH: tl.constexpr, DP: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Program (row, block of heads)."""
    t = tl.program_id(0).to(tl.int64)
    h = (tl.program_id(1) * BH + tl.arange(0, BH))[:, None]
    d = tl.arange(0, DP)[None, :]
    inside = (h < H) & (d < D)
    weight = tl.load(norm_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    depend(PDL)
    o = tl.load(o_ptr + (t * H + h) * D + d, mask=inside, other=0.0)
    gate = tl.load(gate_ptr + t * gate_stride + h * D + d, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(o * o, 1, keep_dims=True) / D + eps)
    y = o * scale * weight / (1.0 + tl.exp(-gate))
    tl.store(y_ptr + (t * H + h) * D + d, y.to(y_ptr.dtype.element_ty), mask=inside)


def gated_norm(o: torch.Tensor, gate: torch.Tensor, norm: Norm) -> torch.Tensor:
    """The rows that `gated_norm_linear` multiplies: [T, H * D] in the gate's dtype."""
    T, H, D = o.shape
    assert o.is_contiguous() and gate.stride()[1:] == (D, 1), (o.stride(), gate.stride())
    y, BH = gate.new_empty(T, H * D), min(8, next_power_of_2(H))
    launch(gated_norm_kernel, (T, triton.cdiv(H, BH)), o, gate, norm[0], y, gate.stride(0), H, D, norm[1], BH=BH,
           DP=next_power_of_2(D), device=o.device, num_warps=4)  # fmt: skip
    return y
