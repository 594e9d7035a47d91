"""The router's choice for the rows of a long window; a round's kernels choose on their own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soloist.ops.gpu.launch import depend, launch, next_power_of_2
from soloist.ops.gpu.moe import choose, slot_experts, sortable
from soloist.ops.route import route

ROUTED = tl.constexpr(8)
"""Rows that a program routes: see `choose`."""


@triton.jit(do_not_specialize=["T"])
def route_kernel(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr, T, E: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, NORMALISE: tl.constexpr, SCALING: tl.constexpr,
    GP: tl.constexpr, SP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program of 8 rows: weights [T, TOP_K] fp32 and experts [T, TOP_K] int64, best first."""
    LEAST: tl.constexpr = -2147483648
    t0 = tl.program_id(0) * ROUTED
    t = t0 + tl.arange(0, ROUTED)
    slot = tl.arange(0, GP * SP)
    expert = slot_experts(E, GROUPS, GP, SP)
    real = (slot // SP < GROUPS) & (slot % SP < E // GROUPS)
    depend(PDL)
    chosen, weight = choose(logits_ptr, bias_ptr, t0, T, E, GROUPS, TOP_GROUPS, TOP_K, SIGMOID, HAS_BIAS, NORMALISE, SCALING,
                            GP, SP)  # fmt: skip
    inside = (t < T)[:, None] & real[None, :]
    score = tl.load(logits_ptr + t[:, None] * E + expert[None, :], mask=inside, other=float("-inf"))
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-score))
    else:
        score = tl.exp(score - tl.max(score, 1)[:, None])
        score = score / tl.sum(score, 1)[:, None]
    if HAS_BIAS:
        score += tl.load(bias_ptr + expert, mask=real, other=0.0)[None, :]
    rank = tl.where(chosen > 0, sortable(score), LEAST)
    for place in tl.static_range(TOP_K):
        best = tl.min(tl.where(rank == tl.max(rank, 1)[:, None], slot[None, :], GP * SP), 1)
        taken = slot[None, :] == best[:, None]
        at = t * TOP_K + place
        tl.store(weights_ptr + at, tl.sum(tl.where(taken, weight, 0.0), 1), mask=t < T)
        tl.store(experts_ptr + at, tl.sum(tl.where(taken, expert[None, :], 0), 1).to(tl.int64), mask=t < T)
        rank = tl.where(taken, LEAST, rank)


@route.impl("triton", on="cuda")
def _route(
    logits: torch.Tensor,
    selection_bias: torch.Tensor | None,
    top_k: int,
    num_groups: int,
    top_groups: int,
    score: str,
    normalise: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    (T, E), device = logits.shape, logits.device
    weights = torch.empty((T, top_k), dtype=torch.float32, device=device)
    experts = torch.empty((T, top_k), dtype=torch.int64, device=device)
    launch(
        route_kernel, (triton.cdiv(T, ROUTED.value),), logits.contiguous(), selection_bias, weights, experts, T, E=E,
        GROUPS=num_groups, TOP_GROUPS=top_groups, TOP_K=top_k, SIGMOID=score == "sigmoid", HAS_BIAS=selection_bias is not None,
        NORMALISE=normalise, SCALING=scaling, GP=next_power_of_2(num_groups), SP=next_power_of_2(E // num_groups),
        num_warps=ROUTED.value, device=device,
    )  # fmt: skip
    return weights, experts
