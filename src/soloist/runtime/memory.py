"""What a rank needs of its device's memory, said and checked before anything is loaded."""

from __future__ import annotations

import torch

from soloist.config import Plan
from soloist.errors import UserError

RESERVE_BYTES = 1 << 30
"""For kernels, activations and CUDA graphs on a GPU."""


def memory_line(plan: Plan, free: int) -> str:
    """The plan in one line."""
    return (
        f"{_where(plan)}: weights {plan.parameter_bytes / 1e9:.2f} GB, caches {plan.state_bytes / 1e9:.2f} GB, "
        f"free {free / 1e9:.2f} GB"
    )


def check_memory(plan: Plan, free: int) -> None:
    """Raises: UserError where the plan cannot fit. A CPU's caches take no memory before they are used, so only the
    weights count there.
    """
    on_cpu = plan.device == "cpu"
    needed = plan.parameter_bytes + (0 if on_cpu else plan.state_bytes + RESERVE_BYTES)
    if needed > free:
        raise UserError(
            f"{memory_line(plan, free)}: {needed / 1e9:.2f} GB are needed; raise tensor_parallel, lower context_length, or "
            "choose a dtype of fewer bytes"
        )


def free_bytes(device: torch.device, ranks_here: int = 1) -> int:
    """Memory that can still be had on a device, a CPU's divided by the ranks that share it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            known = {name: int(value.split()[0]) * 1024 for name, value in (line.split(":", 1) for line in file)}
    except OSError:
        return 1 << 62  # not told here, so nothing is refused
    return known["MemAvailable"] // ranks_here


def _where(plan: Plan) -> str:
    return f"memory of {plan.device}" if plan.ranks == "1" else f"memory of rank {plan.ranks} on {plan.device}"
