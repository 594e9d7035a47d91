"""NVIDIA GPUs as nvidia-smi shows them: clocks, power, who else computes on them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence

from soloist.cli.checks.finding import Finding, note, ok, slow

FIELDS = (
    "index", "name", "persistence_mode", "power.limit", "power.default_limit", "temperature.gpu", "clocks.sm",
    "clocks.max.sm", "clocks_throttle_reasons.hw_slowdown", "clocks_throttle_reasons.sw_thermal_slowdown",
    "clocks_throttle_reasons.sw_power_cap", "memory.used", "memory.total", "mig.mode.current",
)  # fmt: skip


CSV = ["--format=csv,noheader,nounits"]
SPELLINGS = ("clocks_throttle_reasons", "clocks_event_reasons")
"""What older and newer drivers call it; some know one of them only."""


def query_gpus() -> tuple[str, str] | None:
    """nvidia-smi's rows of FIELDS, and of computing processes; empty if it fails, None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = gpu_command(FIELDS)
    processes = _output(["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", *CSV])
    return "" if command is None else _output(command), processes


def gpu_command(fields: Sequence[str], gpus: Sequence[str] = ()) -> list[str] | None:
    """The command that makes nvidia-smi print these fields, in words that its driver knows; None if it answers to none.

    Args: gpus: uuids, none for all of them.
    """
    chosen = ["-i", ",".join(gpus)] if gpus else []
    for spelling in SPELLINGS:
        names = ",".join(fields).replace(SPELLINGS[0], spelling)
        command = ["nvidia-smi", *chosen, f"--query-gpu={names}", *CSV]
        if _output(command):
            return command
    return None


def _output(command: list[str]) -> str:
    """Empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def check_gpus(gpus: str, processes: str) -> list[Finding]:
    """Args: the rows of `query_gpus`."""
    if not gpus.strip():
        return [slow("GPU", "nvidia-smi is there, but shows no GPU", "run nvidia-smi: it says what is wrong")]
    found = []
    for row in gpus.strip().splitlines():
        found += _check_gpu(dict(zip(FIELDS, (value.strip() for value in row.split(",")), strict=True)))
    others = [[value.strip() for value in row.split(",")] for row in processes.strip().splitlines()]
    if others:
        named = ", ".join(f"{name} (pid {pid}, {used} MB)" for pid, name, used in others[:4])
        found.append(slow("GPU load", f"{len(others)} other processes hold a GPU: {named}",
                          "end them, or choose another GPU with --device cuda:N"))  # fmt: skip
    return found


def check_peers(count: int, reaches: Callable[[int, int], bool]) -> list[Finding]:
    """Args: reaches: whether a GPU can read the memory of another."""
    apart = [f"{a}-{b}" for a in range(count) for b in range(a + 1, count) if not (reaches(a, b) and reaches(b, a))]
    if apart:
        named = ", ".join(apart[:6])
        return [slow("GPU peers", f"{named} cannot read each other's memory: sums of ranks go through the host",
                     "choose GPUs of one switch (nvidia-smi topo -m), or turn off IOMMU and ACS for them")]  # fmt: skip
    return [ok("GPU peers", f"all {count} GPUs read each other's memory")] if count > 1 else []


def _check_gpu(gpu: dict[str, str]) -> list[Finding]:
    topic, found = f"GPU {gpu['index']}", []
    limit, usual = _number(gpu["power.limit"]), _number(gpu["power.default_limit"])
    if gpu["persistence_mode"] == "Disabled":
        found.append(slow(topic, "persistence mode is off: the driver starts anew for every program",
                          "sudo nvidia-smi -pm 1"))  # fmt: skip
    if limit and usual and limit < usual:
        found.append(slow(topic, f"power is limited to {limit:.0f} W of {usual:.0f} W",
                          f"sudo nvidia-smi -pl {usual:.0f}"))  # fmt: skip
    if "Active" in (gpu["clocks_throttle_reasons.hw_slowdown"], gpu["clocks_throttle_reasons.sw_thermal_slowdown"]):
        found.append(slow(topic, f"clocks are throttled at {gpu['temperature.gpu']} C", "better cooling"))
    if gpu["clocks_throttle_reasons.sw_power_cap"] == "Active":
        found.append(slow(topic, "clocks are held down by the power limit", "end other work, or raise the limit"))
    if gpu["mig.mode.current"] == "Enabled":
        found.append(note(topic, "is split into instances (MIG); each has part of the bandwidth"))
    facts = (
        f"{gpu['name']}, {gpu['clocks.sm']} of {gpu['clocks.max.sm']} MHz now, {gpu['temperature.gpu']} C, "
        f"{gpu['memory.used']} of {gpu['memory.total']} MB in use"
    )
    return found or [ok(topic, facts)]


def _number(text: str) -> float | None:
    """nvidia-smi writes [N/A] for what a GPU does not report."""
    try:
        return float(text)
    except ValueError:
        return None
