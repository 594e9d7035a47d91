"""The gated delta rule with gradients: fla's chunk kernels on a GPU, a chunked torch form elsewhere.

Both take the raw decay input and apply Ling's bounded law g = lower_bound * sigmoid(exp(A_log) * (f + dt_bias)).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

# 16 rows at the bound of -5 give exponents of at most 40 on either side of a middle row: safe in fp32
CHUNK = 16


def decay(f: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """Log decay [..., H, Dk] fp32, in (lower_bound, 0), from the decay projection f [..., H, Dk]."""
    heads, width = f.shape[-2:]
    return lower_bound * torch.sigmoid(a_log.float().exp()[:, None] * (f.float() + dt_bias.float().view(heads, width)))


def unit(x: Tensor) -> Tensor:
    """Scale the last axis to unit length; 1e-6 is added to the sum of squares."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float
) -> Tensor:
    """Output of the gated delta rule over whole sequences, state starting at zero.

    Args: q, k [B, T, H, Dk] before length normalisation; v [B, T, H, Dv]; f [B, T, H, Dk] raw decay input;
        beta [B, T, H] in (0, 1); a_log [H]; dt_bias [H * Dk].
    Returns: o [B, T, H, Dv] in v's dtype.
    """
    kernel = _fla_kernel() if q.is_cuda else None
    if kernel is not None:
        return kernel(
            q=q,
            k=k,
            v=v,
            g=f,
            beta=beta,
            A_log=a_log,
            dt_bias=dt_bias,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            safe_gate=True,
            lower_bound=lower_bound,
            disable_recompute=True,
        )[0]
    scaled = unit(q) * q.shape[-1] ** -0.5
    return _chunked(scaled, unit(k), v.float(), decay(f, a_log, dt_bias, lower_bound), beta.float()).to(v.dtype)


@functools.cache
def _fla_kernel() -> Callable[..., tuple[Tensor, Tensor]] | None:
    try:
        from fla.ops.kda import chunk_kda
    except ImportError:
        return None
    return chunk_kda


def _chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Chunk-parallel form, fp32. Inputs [B, T, H, D]; q scaled, q and k of unit length; g log decay."""
    batch, length, heads, width = q.shape
    pad = -length % CHUNK
    if pad:
        q, k, v, g = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v, g))
        beta = torch.nn.functional.pad(beta, (0, 0, 0, pad))
    chunks = (length + pad) // CHUNK
    # [B, H, chunks, CHUNK, D]
    q, k, v, g = (x.view(batch, chunks, CHUNK, heads, -1).permute(0, 3, 1, 2, 4) for x in (q, k, v, g))
    beta = beta.view(batch, chunks, CHUNK, heads).permute(0, 3, 1, 2)[..., None]
    total = g.cumsum(3)
    middle = total[..., CHUNK // 2, None, :]
    rows_q, rows_k, columns = q * (total - middle).exp(), k * (total - middle).exp(), k * (middle - total).exp()
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril(-1)
    a_kk = (beta * (rows_k @ columns.mT)).masked_fill(~lower, 0.0)
    a_qk = (rows_q @ columns.mT).masked_fill(lower.mT, 0.0)
    eye = torch.eye(CHUNK, device=q.device)
    solved = torch.linalg.solve_triangular(
        eye + a_kk, torch.cat([beta * v, beta * k * total.exp()], -1), upper=False, unitriangular=True
    )
    u, w = solved.split([v.shape[-1], width], -1)
    last = total[..., -1:, :]
    q_in, k_out, keep = q * total.exp(), k * (last - total).exp(), last.exp().mT
    state = q.new_zeros(batch, heads, width, v.shape[-1])
    outputs = []
    for c in range(chunks):
        fresh = u[:, :, c] - w[:, :, c] @ state
        outputs.append(q_in[:, :, c] @ state + a_qk[:, :, c] @ fresh)
        state = keep[:, :, c] * state + k_out[:, :, c].mT @ fresh
    o = torch.stack(outputs, 2)
    return o.permute(0, 2, 3, 1, 4).reshape(batch, length + pad, heads, -1)[:, :length]


def delta_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Advance the rule by one token for a batch of sequences.

    Args: q [B, H, Dk] scaled, k [B, H, Dk], v [B, H, Dv], g [B, H, Dk] log decay, beta [B, H], all fp32;
        state [B, H, Dk, Dv] fp32.   Writes: state.   Returns: o [B, H, Dv] fp32.
    """
    state.mul_(g.exp()[..., None])
    error = v - (k[..., None, :] @ state)[..., 0, :]
    state.add_(k[..., :, None] * (beta[..., None] * error)[..., None, :])
    return (q[..., None, :] @ state)[..., 0, :]
