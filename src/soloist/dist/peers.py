"""Sums over peer memory: set up where the GPUs can write each other's, timed against NCCL, and taken where it is faster."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from soloist.dist.group import Ranks
from soloist.errors import UserError
from soloist.ops.all_reduce import PeerSum, inbox_values

MOST_VALUES = 1 << 16
"""A window of 16 rows of 4096."""

PROBE_VALUES = 2560
"""A row of Ling-3.0-flash."""

EXCHANGES = ("auto", "nccl", "one-shot")


def choose_sum(group: Ranks, device: torch.device) -> None:
    """Give the group the faster exchange, and say which. All ranks decide alike, by the slowest rank's times.

    SOLOIST_EXCHANGE=nccl or one-shot, equal for all ranks, takes that one: to compare them.
    """
    wanted = os.environ.get("SOLOIST_EXCHANGE", "auto")
    if wanted not in EXCHANGES:
        raise UserError(f"SOLOIST_EXCHANGE={wanted!r} is not one of {', '.join(EXCHANGES)}")
    summing, reason = peer_sum(group, device)
    if not _all_have(summing is not None, device):
        group.exchange = f"NCCL ({reason or 'another rank has no peer memory'})"
        return
    assert summing is not None
    x = torch.ones(1, PROBE_VALUES, dtype=torch.bfloat16, device=device)
    ours, theirs = slowest_us(lambda: summing(x), device), slowest_us(lambda: group.all_reduce(x), device)
    figures = f"one row: {ours:.1f} us over peer memory, {theirs:.1f} us by NCCL{', as told' * (wanted != 'auto')}"
    if wanted == "one-shot" or wanted == "auto" and ours < theirs:
        group.take(summing)
        group.exchange = f"one shot over peer memory up to {MOST_VALUES} values, NCCL above ({figures})"
    else:
        group.exchange = f"NCCL ({figures})"


def peer_sum(group: Ranks, device: torch.device) -> tuple[PeerSum | None, str]:
    """None, and why, where the GPUs cannot reach each other's memory. Multicast is left alone: writes go to each peer."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    import torch.distributed._symmetric_memory as symmetric

    try:
        inbox = symmetric.empty(inbox_values(group.size, MOST_VALUES), dtype=torch.int64, device=device)
        inbox.zero_()
        handle = symmetric.rendezvous(inbox, _world())
    except RuntimeError as error:
        return None, str(error).splitlines()[0]
    torch.cuda.synchronize(device)
    dist.barrier()  # or a peer's first words could be wiped out
    summing = PeerSum(torch.tensor(handle.buffer_ptrs, device=device), group.rank, MOST_VALUES)
    summing.inbox = inbox
    return summing, ""


def _all_have(here: bool, device: torch.device) -> bool:
    count = torch.tensor([int(here)], device=device)
    dist.all_reduce(count, dist.ReduceOp.MIN)
    return bool(count.item())


def slowest_us(call: Callable[[], torch.Tensor], device: torch.device, times: int = 200) -> float:
    """Microseconds a call, of the slowest rank, in a graph as in a round."""
    call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begun.record()
    graph.replay()
    ended.record()
    ended.synchronize()
    duration = torch.tensor([begun.elapsed_time(ended) * 1e3 / times], device=device)
    dist.all_reduce(duration, dist.ReduceOp.MAX)
    return float(duration.item())


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world
