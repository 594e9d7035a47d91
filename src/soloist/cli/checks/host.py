"""Processor and memory: who may use them, who else does, how fast they are allowed to run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from soloist.cli.checks.finding import Finding, note, ok, slow

BUSY_SHARE = 0.2
"""Of one core, above which a process is worth naming."""


@dataclass(frozen=True)
class Cpus:
    """CPUs of the machine, those this process may run on, how many its container may fill; and cores, twins apart."""

    online: int
    allowed: int
    quota: float | None
    cores: int

    @property
    def usable(self) -> int:
        """Threads that run at once without sharing a core."""
        limits = [self.allowed, self.cores] + ([] if self.quota is None else [max(int(self.quota), 1)])
        return min(limits)


def read_cpus(root: Path) -> Cpus:
    online = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else online
    return Cpus(online, allowed, cgroup_cpus(root), physical_cores(root) or online)


def cgroup_cpus(root: Path) -> float | None:
    """CPUs that the control groups above this process leave it, None without a limit."""
    limits = []
    for folder in _cgroups(root):
        quota, _, period = _read(folder / "cpu.max").partition(" ")  # version 2
        if quota.isdigit() and period.isdigit():
            limits.append(int(quota) / int(period))
    quota, period = (_read(root / f"sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))  # version 1
    if quota.isdigit() and period.isdigit():
        limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _cgroups(root: Path) -> list[Path]:
    """Folders of this process's control group and of those around it, innermost first."""
    lines = _read(root / "proc/self/cgroup").splitlines()
    inner = next((line[3:] for line in lines if line.startswith("0::")), "/")
    top = root / "sys/fs/cgroup"
    folder = top / inner.strip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(top))]


def physical_cores(root: Path) -> int:
    """Distinct cores; 0 where the system does not say."""
    cores, package = set(), ""
    for name, value in _cpuinfo(root):
        if name == "physical id":
            package = value
        elif name == "core id":
            cores.add((package, value))
    return len(cores)


def check_threads(cpus: Cpus, threads: int, variable: int | None) -> list[Finding]:
    """threads: what a run would use; variable: OMP_NUM_THREADS."""
    found, topic = [], "CPU threads"
    if cpus.quota is not None and cpus.quota < cpus.allowed:
        found.append(slow(topic, f"a control group leaves {cpus.quota:g} of {cpus.online} CPUs",
                          "raise the container's CPU limit"))  # fmt: skip
    if cpus.allowed < cpus.online:
        found.append(slow(topic, f"this process may run on {cpus.allowed} of {cpus.online} CPUs",
                          "start it without taskset or numactl, or ask the scheduler for more CPUs"))  # fmt: skip
    source = f"{threads} threads" + ("" if variable is None else f" (OMP_NUM_THREADS={variable})")
    if threads > cpus.usable:
        found.append(slow(topic, f"{source} for {cpus.usable} usable cores: they wait for each other",
                          f"--threads {cpus.usable}, or OMP_NUM_THREADS={cpus.usable}"))  # fmt: skip
    elif threads < cpus.usable:
        found.append(slow(topic, f"{source} for {cpus.usable} usable cores",
                          f"--threads {cpus.usable}, or OMP_NUM_THREADS={cpus.usable}"))  # fmt: skip
    return found or [ok(topic, f"{source} for {cpus.usable} usable cores, {cpus.online} CPUs")]


def cpu_name(root: Path) -> str:
    """The processor as the system calls it, empty where it does not."""
    return next((value for name, value in _cpuinfo(root) if name == "model name"), "")


def load_average(root: Path) -> float | None:
    """Of the last minute."""
    text = _read(root / "proc/loadavg").split(" ")[0]
    return float(text) if text else None


def busy_seconds(root: Path) -> float | None:
    """Time that all CPUs together have worked since the system began, or were taken by the host of a virtual machine."""
    fields = _read(root / "proc/stat").partition("\n")[0].split()
    if len(fields) < 9:
        return None
    user, nice, system, _, _, irq, softirq, stolen = map(int, fields[1:9])
    return (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")


def busy_processes(
    root: Path, interval_s: float = 0.3, sleep: Callable[[float], None] = time.sleep
) -> list[tuple[str, float]]:
    """Processes beside this one that keep a core busy for part of the interval: name with pid, share of a core."""
    before, begun = _cpu_ticks(root), time.perf_counter()
    sleep(interval_s)
    after, elapsed = _cpu_ticks(root), max(time.perf_counter() - begun, interval_s)
    ticks = elapsed * os.sysconf("SC_CLK_TCK")
    shares = {pid: (used - before[pid][1]) / ticks for pid, (_, used) in after.items() if pid in before}
    busy = sorted((pid for pid, share in shares.items() if share > BUSY_SHARE), key=lambda pid: -shares[pid])
    return [(f"{after[pid][0]} (pid {pid})", shares[pid]) for pid in busy]


def check_load(root: Path, interval_s: float = 0.3, sleep: Callable[[float], None] = time.sleep) -> list[Finding]:
    """Processes beside this one that keep a core busy for part of the interval."""
    busy, average = busy_processes(root, interval_s, sleep), load_average(root)
    load = "unknown" if average is None else f"{average:.2f}"
    if not busy:
        return [ok("CPU load", f"load average {load}, no other process is busy")]
    named = ", ".join(f"{name} {share:.0%}" for name, share in busy[:4])
    more = f" and {len(busy) - 4} more" if len(busy) > 4 else ""
    return [slow("CPU load", f"load average {load}; of one core each: {named}{more}",
                 "end them or move them elsewhere: they take cores, caches and memory bandwidth")]  # fmt: skip


def _cpu_ticks(root: Path) -> dict[int, tuple[str, int]]:
    """pid -> (name, clock ticks used so far), without this process."""
    found = {}
    for file in (root / "proc").glob("[0-9]*/stat"):
        name, _, rest = _read(file).rpartition(")")
        fields = rest.split()
        if len(fields) > 12 and int(file.parent.name) != os.getpid():
            found[int(file.parent.name)] = (name.partition("(")[2], int(fields[11]) + int(fields[12]))
    return found


def governors(root: Path) -> list[str]:
    """Frequency governors of all CPUs, each once."""
    folder = root / "sys/devices/system/cpu"
    return sorted({_read(file) for file in folder.glob("cpu[0-9]*/cpufreq/scaling_governor")} - {""})


def check_clock(root: Path) -> list[Finding]:
    """The frequency governor, and whether a laptop runs on its battery."""
    found, ruling = [], governors(root)
    speed = _read(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    most = f", up to {int(speed) / 1e6:.1f} GHz" if speed.isdigit() else ""
    if not ruling:
        found.append(ok("CPU clock", "the system shows no governor, as in most virtual machines"))
    elif ruling == ["performance"]:
        found.append(ok("CPU clock", f"governor performance{most}"))
    else:
        found.append(slow("CPU clock", f"governor {', '.join(ruling)}{most}",
                          "sudo cpupower frequency-set -g performance"))  # fmt: skip
    mains = [f for f in (root / "sys/class/power_supply").glob("*/online") if _read(f.parent / "type") == "Mains"]
    if mains and all(_read(file) == "0" for file in mains):
        found.append(slow("power", "running on battery", "plug it in"))
    return found


def check_instructions(root: Path) -> list[Finding]:
    """Vector and matrix instructions."""
    flags = next((set(value.split()) for name, value in _cpuinfo(root) if name in ("flags", "Features")), set())
    topic = "CPU instructions"
    known = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve") if flag in flags]
    if not flags:
        return [note(topic, "the system does not say which there are")]
    if "avx2" in flags or "asimd" in flags:
        return [ok(topic, ", ".join(known))]
    return [slow(topic, "no AVX2: matrix products take several times as long",
                 "use a newer CPU; in a virtual machine pass the host's CPU type through")]  # fmt: skip


def check_memory(root: Path, needed_bytes: int | None) -> list[Finding]:
    """Free memory against what the model needs, if one is given, and swapping."""
    size = _memory(root)
    if "MemAvailable" not in size:
        return [note("memory", "the system does not say how much is free")]
    limits = [int(text) for folder in _cgroups(root) if (text := _read(folder / "memory.max")).isdigit()]
    free = min([size["MemAvailable"], *limits])
    found = []
    needs = "" if needed_bytes is None else f", the model needs {_gb(needed_bytes)}"
    if needed_bytes is not None and needed_bytes > free:
        found.append(slow("memory", f"{_gb(free)} free{needs}",
                          "end other programs, or use --dtype bfloat16 or less --context-length"))  # fmt: skip
    else:
        found.append(ok("memory", f"{_gb(free)} free{needs}"))
    swapped = size.get("SwapTotal", 0) - size.get("SwapFree", 0)
    if swapped > 1 << 26:
        found.append(note("swap", f"{_gb(swapped)} in use: what was swapped out comes back slowly",
                          "free memory, then `sudo swapoff -a && sudo swapon -a`"))  # fmt: skip
    return found


def memory_bytes(root: Path) -> int | None:
    """All of the machine's memory."""
    return _memory(root).get("MemTotal")


def _memory(root: Path) -> dict[str, int]:
    meminfo = {line.split(":")[0]: line.split()[1] for line in _read(root / "proc/meminfo").splitlines() if ":" in line}
    return {name: int(value) * 1024 for name, value in meminfo.items() if value.isdigit()}


def _cpuinfo(root: Path) -> list[tuple[str, str]]:
    lines = _read(root / "proc/cpuinfo").splitlines()
    pairs = [line.partition(":") for line in lines if ":" in line]
    return [(name.strip(), value.strip()) for name, _, value in pairs]


def _read(file: Path) -> str:
    """The file's text, empty where there is none to read: processes end, and containers hide files."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
