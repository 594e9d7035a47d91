"""What a run stands on, read from the machine: what stays (Machine), and what may change under it (Condition)."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import soloist
from soloist.bench.processor import EnergyMeter, clocks_mhz, times_throttled
from soloist.bench.records import Condition, Machine
from soloist.cli.checks import host
from soloist.cli.checks.gpu import FIELDS, gpu_command, query_gpus
from soloist.cli.version import installed, versions

PACKAGES = ("numpy", "safetensors", "tokenizers")

THROTTLE = {
    "clocks_throttle_reasons.hw_slowdown": "hardware slowdown",
    "clocks_throttle_reasons.sw_thermal_slowdown": "temperature",
    "clocks_throttle_reasons.sw_power_cap": "power cap",
}
SAMPLED = ("index", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", *THROTTLE)
SAMPLE_MS = 200


def read_machine(threads: int, root: Path = Path("/")) -> Machine:
    """threads: those of the engine."""
    rows = _gpu_rows()
    commit, dirty = git_state(Path(soloist.__file__).parent)
    found = {**versions(), **{name: installed(name) for name in PACKAGES}, "driver": _driver()}
    system = found.pop("system") or ""
    machine = Machine(
        system=system,
        cpu=host.cpu_name(root),
        cores=host.read_cpus(root).cores,
        threads=threads,
        governor=", ".join(host.governors(root)) or None,
        memory_bytes=host.memory_bytes(root),
        gpus=tuple(row["name"] for row in rows),
        power_limit_w=_numbers(rows, "power.limit"),
        max_clock_mhz=_numbers(rows, "clocks.max.sm"),
        versions=found,
        commit=commit,
        dirty=dirty,
    )
    return dataclasses.replace(machine, unknown=dict(_unknown(machine, root)))


def _unknown(machine: Machine, root: Path) -> Iterator[tuple[str, str]]:
    """Why facts that a reader may look for are not there."""
    virtual = "as in most virtual machines"
    if not machine.governor:
        yield "governor", f"the system shows no governor of the CPU's clock, {virtual}"
    if not clocks_mhz(root):
        yield "cpu_clock_mhz", f"the system shows no clock of its CPUs, {virtual}"
    if times_throttled(root) is None:
        yield "cpu_throttled", f"the system does not count how often heat holds a CPU down, {virtual}"
    if EnergyMeter(root).read_j() is None:
        yield "cpu_energy", f"there is no RAPL counter that this user may read, {virtual}"
    if not machine.cpu:
        yield "cpu", "the system does not name it"
    if machine.memory_bytes is None:
        yield "memory_bytes", "the system has no /proc/meminfo"
    if machine.versions["driver"] is None:
        there = shutil.which("nvidia-smi") is not None
        yield "driver", "nvidia-smi does not answer" if there else "there is no nvidia-smi, so no NVIDIA driver"
    if machine.versions["cuda"] is None:
        yield "cuda", "torch is built without it"
    for name in ("commit", "dirty"):
        if getattr(machine, name) is None:
            yield name, "soloist is an installed package and runs from no repository, or there is no git"


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Commit that the code runs from, and whether anything under version control differs from it.

    None for an installed package, even if its environment lies inside some other repository.
    """
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return _git(folder, "rev-parse", "HEAD"), None if changes is None else bool(changes)


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


class Conditions:
    """Reads the machine's state before, between and after requests; GPUs are sampled all the time by a process beside.

    Use as a context. Where nvidia-smi does not answer, nothing is told of GPUs.
    Args: gpus: uuids of those that compute, none for all, None if none of them does.
    """

    def __init__(self, gpus: Sequence[str] | None = (), root: Path = Path("/")):
        self._gpus = gpus
        self._root, self._begun = root, time.perf_counter()
        self.samples: list[tuple[float, dict[str, str]]] = []
        self._process: subprocess.Popen[str] | None = None
        self._last, self._meter = self._times(), EnergyMeter(root)

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self._begun

    def __enter__(self) -> Conditions:
        command = None if self._gpus is None else gpu_command(SAMPLED, self._gpus)
        if command is not None:
            self._process = subprocess.Popen([*command, "-lms", str(SAMPLE_MS)], stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._collect, args=(self._process,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _collect(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            values = [value.strip() for value in line.split(",")]
            if len(values) == len(SAMPLED):
                self.samples.append((self.now_s, dict(zip(SAMPLED, values, strict=True))))

    def read(self) -> Condition:
        """The state now. Takes a third of a second, in which it looks for busy processes."""
        others = self._others()
        busy = [f"{name} ({share:.0%} of a core)" for name, share in host.busy_processes(self._root)]
        latest = {row["index"]: row for _, row in self.samples[-64:]}
        rows = [latest[index] for index in sorted(latest, key=lambda text: text.zfill(4))]
        found = _condition(self.now_s, rows, host.load_average(self._root), tuple(busy), others)
        return dataclasses.replace(
            found, cpu_clock_mhz=clocks_mhz(self._root), cpu_throttled=times_throttled(self._root)
        )

    def _others(self) -> float | None:
        """Cores that others took since the last call."""
        before, self._last = self._last, self._times()
        elapsed, own = self._last[0] - before[0], self._last[1] - before[1]
        if self._last[2] is None or before[2] is None or elapsed <= 0:
            return None
        return max((self._last[2] - before[2] - own) / elapsed, 0.0)

    def _times(self) -> tuple[float, float, float | None]:
        """Now, the processor time of this process, and that of all."""
        return time.perf_counter(), time.process_time(), host.busy_seconds(self._root)

    def extremes(self, begin_s: float, end_s: float) -> list[Condition]:
        """The GPU samples of the slowest and the fastest clock between two times, and one for each reason to throttle."""
        taken = [(t, row) for t, row in self.samples if begin_s <= t <= end_s and row["clocks.sm"].isdigit()]
        if not taken:
            return []
        by_clock = sorted(taken, key=lambda pair: float(pair[1]["clocks.sm"]))
        picked = [by_clock[0], by_clock[-1]]
        picked += [next(pair for pair in taken if pair[1][name] == "Active") for name in THROTTLE
                   if any(row[name] == "Active" for _, row in taken)]  # fmt: skip
        return [_condition(t, [row], None, ()) for t, row in picked]

    def during(self, begin_s: float, end_s: float) -> list[dict[str, str]]:
        """GPU samples taken between two times."""
        times = [t for t, _ in self.samples]
        return [row for _, row in self.samples[bisect_left(times, begin_s) : bisect_right(times, end_s)]]

    def mark(self) -> tuple[float, float | None]:
        """A moment, for `energy_since`."""
        return self.now_s, self._meter.read_j()

    def energy_since(self, mark: tuple[float, float | None]) -> float | None:
        """Of what computes, since then: the GPUs, or the CPU's packages; None where nobody measures it."""
        (begin_s, before), (now_s, after) = mark, self.mark()
        if self._gpus is not None:
            return self.energy_j(begin_s, now_s)
        return None if before is None or after is None else after - before

    def energy_j(self, begin_s: float, end_s: float) -> float | None:
        """Mean power of all GPUs times the time between; None if fewer than four samples fall into it."""
        rows = self.during(begin_s, end_s)
        gpus = {row["index"] for row in rows}
        watts = _numbers(rows, "power.draw")
        if not gpus or len(watts) < 4 * len(gpus):
            return None
        return sum(watts) / len(watts) * len(gpus) * (end_s - begin_s)


def uuids(device: str, ranks: int = 1) -> tuple[str, ...] | None:
    """Of the GPUs that a plan's device means, as nvidia-smi calls them; None for a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    first = torch.device(device).index or 0
    names = (str(torch.cuda.get_device_properties(first + rank).uuid) for rank in range(ranks))
    return tuple(f"GPU-{name.removeprefix('GPU-')}" for name in names)


def _condition(
    t_s: float, rows: list[dict[str, str]], load: float | None, busy: tuple[str, ...], others: float | None = None
) -> Condition:
    return Condition(
        other_cores=others,
        t_s=t_s,
        load=load,
        busy=busy,
        clock_mhz=_numbers(rows, "clocks.sm"),
        memory_clock_mhz=_numbers(rows, "clocks.mem"),
        temperature_c=_numbers(rows, "temperature.gpu"),
        power_w=_numbers(rows, "power.draw"),
        throttle=tuple(sorted({reason for row in rows for name, reason in THROTTLE.items() if row[name] == "Active"})),
    )


def _gpu_rows() -> list[dict[str, str]]:
    found = query_gpus()
    rows = found[0].strip().splitlines() if found else []
    return [dict(zip(FIELDS, (value.strip() for value in row.split(",")), strict=True)) for row in rows]


def _driver() -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stdout.strip().splitlines() or [None])[0] if done.returncode == 0 else None  # type: ignore[list-item]


def _numbers(rows: list[dict[str, str]], name: str) -> tuple[float, ...]:
    """Values that the driver tells; [N/A] is left out."""
    return tuple(float(row[name]) for row in rows if row[name].replace(".", "", 1).isdigit())
