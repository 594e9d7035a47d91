"""The gated delta rule over a long stretch of tokens, in chunks of 64: the prefill form of `kda_step`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from soloist.ops.kda_step import _case as _step_case
from soloist.ops.op import op

CHUNK = 64
BLOCK = 16
"""Rows that share a reference decay. exp(-G) over a whole chunk would reach exp(320); over a block it stays below
exp(75), since the log decay of one token is above -5."""


@op(cases=[_step_case(1, 4, 32, 32, 0), _step_case(63, 2, 32, 16, 3), _step_case(130, 3, 33, 17, 1)],
    rtol=1e-4, atol=1e-4)  # fmt: skip
def kda_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    live: torch.Tensor,
) -> torch.Tensor:
    """Advance the gated delta rule over T tokens, T of any size, and keep the last state in slot 0.

    Args and law: as `kda_step`, with g > -5.   Writes: states[0].   Returns: o [T, H, Dv] fp32.
    Source: chunked form of the Kimi Linear paper (WY representation), sub-blocks as fla's "safe gate".
    """
    T, H, _ = q.shape
    U, W, read, attention, write, keep = prepare_chunks(q, k, v, g, beta)
    state = states.index_select(0, live)[0]
    outputs = []
    for n in range(U.shape[0]):
        delta = U[n] - W[n] @ state
        outputs.append(read[n] @ state + attention[n] @ delta)
        state = keep[n][..., None] * state + write[n].transpose(-1, -2) @ delta
    states[0] = state
    return torch.stack(outputs).transpose(1, 2).reshape(-1, H, v.shape[-1])[:T]


def prepare_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """What does not depend on the state, for N chunks at once, so that per chunk, head by head,

        delta = U - W S;  o = read S + attention delta;  S <- diag(keep) S + write^T delta.

    Returns: U [N, H, CHUNK, Dv]; W, read [N, H, CHUNK, Dk]; attention [N, H, CHUNK, CHUNK]; write as read; keep [N, H, Dk].
    """
    Dk = q.shape[2]
    pad = -q.shape[0] % CHUNK

    def chunks(x: torch.Tensor) -> torch.Tensor:  # [T, H, ...] -> [N, H, CHUNK, ...]
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, pad))
        return x.view(-1, CHUNK, *x.shape[1:]).transpose(1, 2).contiguous()

    q, k, v, g, beta = chunks(q), chunks(k), chunks(v), chunks(g), chunks(beta)[..., None]
    G = g.double().cumsum(-2)  # inclusive log decay in the chunk: differences of sums near -320 need more than fp32
    attention, overlap = _decayed_products(q, k, G)
    overlap = beta * overlap.tril(-1)
    decay = G.exp().float()
    right = torch.cat((beta * v, beta * k * decay), -1)
    solved = torch.linalg.solve_triangular(overlap, right, upper=False, unitriangular=True)
    U, W = solved.split((v.shape[-1], Dk), -1)
    return U, W, q * decay, attention, k * (G[:, :, -1:] - G).exp().float(), decay[:, :, -1]


def _decayed_products(q: torch.Tensor, k: torch.Tensor, G: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """sum_d x_i[d] k_j[d] exp(G_i[d] - G_j[d]) for j <= i, with x = q and x = k: two [N, H, CHUNK, CHUNK].

    Row block I takes its first row as the reference: exponents are <= 0 on the row side, and on the column side <= 0
    for earlier blocks and < 75 inside the block.
    """
    shape = (*q.shape[:-1], CHUNK)
    attention, overlap = q.new_zeros(shape), q.new_zeros(shape)
    for first in range(0, CHUNK, BLOCK):
        end = first + BLOCK
        reference = G[:, :, first : first + 1]
        row_decay = (G[:, :, first:end] - reference).float().exp()
        columns = (k[:, :, :end] * (reference - G[:, :, :end]).float().exp()).transpose(-1, -2)
        attention[:, :, first:end, :end] = (q[:, :, first:end] * row_decay) @ columns
        overlap[:, :, first:end, :end] = (k[:, :, first:end] * row_decay) @ columns
    return attention.tril(), overlap
