"""The kernel behind ops/all_reduce."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from soloist.ops.gpu.launch import depend, launch

if TYPE_CHECKING:
    from soloist.ops.all_reduce import PeerSum

BLOCK = tl.constexpr(512)
PATIENCE = 1 << 26
"""Polls, most of a minute, before a peer is given up: it may be compiling."""

GLANCE = tl.constexpr(1024)
"""Polls between two looks at `missed`, which lies in the host's memory, a microsecond away."""


@triton.jit
def send(address, word, mask, RELAXED: tl.constexpr):
    """Write 8-byte words that a peer may be reading."""
    if RELAXED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.relaxed.sys.global.b64 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,l,r", [address, word, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(address.to(tl.pointer_type(tl.int64)), word, mask=mask)


@triton.jit
def all_reduce_kernel(
    x_ptr, residual_ptr, y_ptr, inboxes_ptr, epochs_ptr, missed_ptr, N, rank, patience,
    SIZE: tl.constexpr, MOST: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATHER: tl.constexpr, PUSH: tl.constexpr,
    PULL: tl.constexpr, RELAXED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i sums values i * BLOCK .. of x [N], or sets them side by side. A word: the fp32 bits above, the epoch below."""
    program = tl.program_id(0)
    place = program * BLOCK + tl.arange(0, BLOCK)
    inside = place < N
    depend(PDL)
    epoch = tl.load(epochs_ptr + program) + 1
    turn = (epoch % 2).to(tl.int64) * SIZE
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if PUSH:
        bits = x.to(tl.int32, bitcast=True).to(tl.int64)
        word = (bits << 32) | epoch.to(tl.int64)
        for peer in tl.static_range(SIZE):
            base = tl.load(inboxes_ptr + peer)
            send(base + ((turn + rank) * MOST + place) * 8, word, inside, RELAXED)
    if PULL:
        own = tl.load(inboxes_ptr + rank)
        total = tl.zeros((BLOCK,), tl.float32)
        for peer in tl.static_range(SIZE):
            source = (own + ((turn + peer) * MOST + place) * 8).to(tl.pointer_type(tl.int64))
            word = tl.load(source, mask=inside, other=0, volatile=True)
            polls = 0
            waiting = tl.sum((inside & (word.to(tl.int32) != epoch)).to(tl.int32), 0)
            while (waiting > 0) & (polls < patience):
                word = tl.load(source, mask=inside, other=0, volatile=True)
                waiting = tl.sum((inside & (word.to(tl.int32) != epoch)).to(tl.int32), 0)
                polls += 1
                if polls % GLANCE == 0:
                    if tl.load(missed_ptr, volatile=True) > 0:
                        polls += patience
            if waiting > 0:
                tl.store(missed_ptr, 1)
            value = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
            if GATHER:
                tl.store(y_ptr + peer * N + place, value.to(y_ptr.dtype.element_ty), mask=inside)
            total += value
        if HAS_RESIDUAL:
            total += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if not GATHER:
            tl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty), mask=inside)
        tl.store(epochs_ptr + program, epoch)


def exchange(
    summing: PeerSum, x: torch.Tensor, residual: torch.Tensor | None = None, *, gather: bool = False, push: bool = True,
    pull: bool = True, patience: int = PATIENCE,
) -> torch.Tensor:  # fmt: skip
    """Both halves of the sum in one launch, or, where ranks take turns in one process, one after the other.

    gather: do not sum, but return what came: [size, *x.shape].
    """
    assert x.numel() <= summing.most_values, (x.shape, summing.most_values)
    size = len(summing.inboxes)
    y = x.new_empty((size, *x.shape)) if gather else torch.empty_like(x)
    interpreted = isinstance(all_reduce_kernel, InterpretedFunction)
    launch(
        all_reduce_kernel, (triton.cdiv(x.numel(), BLOCK.value),), x, x if residual is None else residual, y,
        summing.inboxes, summing.epochs, summing.missed, x.numel(), summing.rank, patience, device=x.device,
        SIZE=size, MOST=summing.most_values, HAS_RESIDUAL=residual is not None, GATHER=gather, PUSH=push, PULL=pull,
        RELAXED=not interpreted, num_warps=4,
    )  # fmt: skip
    return y
