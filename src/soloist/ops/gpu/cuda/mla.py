"""Gated MLA of a round in CUDA C++, see mla.cu."""

from __future__ import annotations

import math

import numpy as np
import torch

from soloist.ops.gpu import mla as triton_mla
from soloist.ops.gpu.attention import num_runs
from soloist.ops.gpu.cuda.linear import ROWS, lies_well
from soloist.ops.gpu.cuda.program import is_available, kernel
from soloist.ops.gpu.launch import num_sms
from soloist.ops.mla import mla_round

TILE, QUERIES, ABSORBED, SLICES, THREADS = 64, 16, 64, 4, 256
SHORT_CONTEXT = 8192
"""Up to here a run is one tile, so a second one has nothing to hold."""
MOST_RUNS = 1536
MOST_ROWS = 16


def suits(
    q: torch.Tensor, kv: torch.Tensor, up_key: torch.Tensor, up_value: torch.Tensor, latents: torch.Tensor, bound: int
) -> bool:
    """bf16, clusters of blocks, whole chunks, latent columns that eight warps share, rows of 16 bytes."""
    (_, R, N), DR = up_key.shape, latents.shape[3] - up_key.shape[1]
    bf16 = all(x.dtype == torch.bfloat16 for x in (q, kv, up_key, up_value, latents))
    return (
        bf16 and is_available(q.device) and R in (128, 256, 512, 1024) and N % 32 == 0 and (R + DR) % 32 == 0 and DR % 2 == 0
        and q.shape[0] <= MOST_ROWS and num_runs(bound) <= MOST_RUNS and q.stride(1) % 8 == 0 and q.stride(2) == 1
        and lies_well(q[:, 0], kv) and up_value.stride()[1:] == (R, 1)
    )  # fmt: skip


@mla_round.impl("cuda", on="cuda")
def _mla_round(
    q: torch.Tensor,
    kv: torch.Tensor,
    gate: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    up_key: torch.Tensor,
    up_value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    latents: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
    table: torch.Tensor | None,
    start: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    T, (H, R, N), DV = q.shape[0], up_key.shape, up_value.shape[1]
    pages, _, P, width = latents.shape
    if table is not None or not suits(q, kv, up_key, up_value, latents, pages * P):
        return triton_mla._triton(q, kv, gate, norm_weight, eps, up_key, up_value, cos, sin, interleaved, latents, page, offset,
                                  table, start, scale)  # fmt: skip
    assert up_key.is_contiguous() and latents.is_contiguous() and gate.stride(1) == 1
    runs, device, count = num_runs(pages * P), q.device, np.int32(T)
    stages = 1 if pages * P <= SHORT_CONTEXT else 2
    row_tiles = -(-T * H // QUERIES)
    query_tiles = 1 if row_tiles == 1 else 2
    tile_bytes = (stages * TILE + query_tiles * QUERIES) * (width + 8) * 2 + query_tiles * 2 * QUERIES * (TILE + 4) * 4
    sizes = {"H": H, "N": N, "DR": width - R, "R": R, "DV": DV, "STEP": 2 if interleaved else 1, "HALVES": -(-T // ROWS),
             "STAGES": stages, "QUERY_TILES": query_tiles}  # fmt: skip
    queries, parts = q.new_empty(T, H, width), q.new_empty(runs, T * H, R)
    logs, out = q.new_empty(runs, T * H, dtype=torch.float32), q.new_empty(T, H * DV)
    kernel("mla", "absorb", 0, device, **sizes)(
        (H * (R // ABSORBED) + 2 * T,), 128, 0, q, np.int64(q.stride(0)), np.int64(q.stride(1)), kv, np.int64(kv.stride(0)),
        norm_weight, np.float32(eps), up_key, cos.contiguous(), sin.contiguous(), latents, page, offset, queries, count,
        np.int32(P),
    )  # fmt: skip
    kernel("mla", "attend", tile_bytes, device, **sizes)(
        (runs, min(-(-row_tiles // query_tiles), max(1, num_sms(device) // runs))), THREADS, tile_bytes, queries, latents, start,
        parts, logs, np.float32(scale * math.log2(math.e)), count,
    )  # fmt: skip
    kernel("mla", "project", 0, device, **sizes)(
        (H, SLICES, T), THREADS, 0, parts, logs, up_value, np.int64(up_value.stride(0)), gate,
        np.int64(gate.stride(0)), start, out, count,
    )  # fmt: skip
    return out
