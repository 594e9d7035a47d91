"""`soloist doctor`: every check finds its fault in a machine that has it, and none in a machine that has not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from soloist.cli import main
from soloist.cli.checks import gpu, host, install
from soloist.cli.checks.finding import Finding
from soloist.cli.checks.install import TorchBuild
from soloist.runtime import traffic
from soloist.testing.checkpoints import write_checkpoint


def verdicts(findings: list[Finding]) -> list[str]:
    assert all(finding.remedy for finding in findings if finding.verdict == "slow")
    return [finding.verdict for finding in findings]


def machine(root: Path, **files: str) -> Path:
    """A root folder with system files; two underscores in a name stand for a slash."""
    for name, text in files.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


CPUINFO = "\n\n".join(
    f"processor\t: {cpu}\nphysical id\t: 0\ncore id\t: {cpu // 2}\nflags\t: fpu avx2 avx512f" for cpu in range(8)
)


def test_limits_of_control_groups_are_found_at_every_level(tmp_path: Path) -> None:
    inner = {"proc__self__cgroup": "0::/user/app", "sys__fs__cgroup__user__app__cpu.max": "max 100000"}
    assert host.cgroup_cpus(machine(tmp_path / "free", **inner)) is None
    outer = {**inner, "sys__fs__cgroup__user__cpu.max": "150000 100000"}
    assert host.cgroup_cpus(machine(tmp_path / "outer", **outer)) == 1.5
    old = {"sys__fs__cgroup__cpu__cpu.cfs_quota_us": "200000", "sys__fs__cgroup__cpu__cpu.cfs_period_us": "100000"}
    assert host.cgroup_cpus(machine(tmp_path / "old", **old)) == 2
    assert host.cgroup_cpus(tmp_path / "nothing") is None


def test_twins_of_a_core_count_once(tmp_path: Path) -> None:
    assert host.physical_cores(machine(tmp_path, proc__cpuinfo=CPUINFO)) == 4


@pytest.mark.parametrize(
    ("cpus", "threads", "variable", "expected"),
    [
        (host.Cpus(8, 8, None, 4), 4, None, ["ok"]),
        (host.Cpus(8, 8, None, 4), 8, 8, ["slow"]),
        (host.Cpus(8, 8, None, 4), 1, 1, ["slow"]),
        (host.Cpus(8, 8, 1.5, 4), 1, None, ["slow"]),
        (host.Cpus(8, 2, None, 4), 2, None, ["slow"]),
        (host.Cpus(8, 2, 1.5, 4), 8, None, ["slow", "slow", "slow"]),
    ],
)
def test_threads_fit_the_cores(cpus: host.Cpus, threads: int, variable: int | None, expected: list[str]) -> None:
    assert verdicts(host.check_threads(cpus, threads, variable)) == expected


def stat(name: str, ticks: int) -> str:
    return f"1 ({name}) S 1 1 1 0 -1 4194560 1 1 1 1 {ticks} {ticks} 0 0 20 0 1 0 1 1 1"


def test_busy_processes_are_named(tmp_path: Path) -> None:
    files = {"proc__12__stat": stat("a b) c", 100), "proc__13__stat": stat("idle", 5)}
    root = machine(tmp_path, proc__loadavg="1.50 1.00 0.50 1/100 7", **files)
    assert verdicts(host.check_load(root, 0.01)) == ["ok"]

    def meanwhile(seconds: float) -> None:
        machine(root, **{"proc__12__stat": stat("a b) c", 150), f"proc__{os.getpid()}__stat": stat("self", 999)})

    (found,) = host.check_load(root, 1.0, meanwhile)
    assert found.verdict == "slow" and "a b) c (pid 12) 100%" in found.found and "load average 1.50" in found.found
    assert "idle" not in found.found and "self" not in found.found


def test_a_process_that_is_really_busy_is_seen() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        (found,) = host.check_load(Path("/"), 0.5)
        assert found.verdict == "slow" and f"(pid {busy.pid})" in found.found
    finally:
        busy.kill()
        busy.wait()


GOVERNOR = "sys__devices__system__cpu__cpu0__cpufreq__scaling_governor"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ["ok"]),
        ({GOVERNOR: "performance"}, ["ok"]),
        ({GOVERNOR: "powersave"}, ["slow"]),
        ({GOVERNOR: "performance", "sys__class__power_supply__AC__type": "Mains",
          "sys__class__power_supply__AC__online": "0"}, ["ok", "slow"]),
        ({GOVERNOR: "performance", "sys__class__power_supply__AC__type": "Mains",
          "sys__class__power_supply__AC__online": "1"}, ["ok"]),
    ],
)  # fmt: skip
def test_governor_and_battery(files: dict[str, str], expected: list[str], tmp_path: Path) -> None:
    assert verdicts(host.check_clock(machine(tmp_path, **files))) == expected


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [(CPUINFO, "ok"), ("Features : fp asimd", "ok"), ("flags : fpu sse2", "slow"), ("", "note")],
)
def test_instructions(cpuinfo: str, expected: str, tmp_path: Path) -> None:
    assert verdicts(host.check_instructions(machine(tmp_path, proc__cpuinfo=cpuinfo))) == [expected]


def test_memory_against_the_model_and_the_container(tmp_path: Path) -> None:
    meminfo = "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\nSwapTotal: 1000000 kB\nSwapFree: {} kB"
    root = machine(tmp_path / "a", proc__meminfo=meminfo.format(1000000))
    assert verdicts(host.check_memory(root, None)) == ["ok"]
    assert verdicts(host.check_memory(root, 7_000_000_000)) == ["ok"]
    assert verdicts(host.check_memory(root, 9_000_000_000)) == ["slow"]
    machine(root, **{"sys__fs__cgroup__memory.max": "1000000000"})
    assert verdicts(host.check_memory(root, 7_000_000_000)) == ["slow"]
    assert verdicts(host.check_memory(machine(tmp_path / "b", proc__meminfo=meminfo.format(0)), None)) == ["ok", "note"]
    assert verdicts(host.check_memory(tmp_path / "nothing", None)) == ["note"]


GPU = {
    "index": "0", "name": "NVIDIA H200", "persistence_mode": "Enabled", "power.limit": "700.00",
    "power.default_limit": "700.00", "temperature.gpu": "30", "clocks.sm": "345", "clocks.max.sm": "1980",
    "clocks_throttle_reasons.hw_slowdown": "Not Active", "clocks_throttle_reasons.sw_thermal_slowdown": "Not Active",
    "clocks_throttle_reasons.sw_power_cap": "Not Active", "memory.used": "0", "memory.total": "143771",
    "mig.mode.current": "Disabled",
}  # fmt: skip


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ({}, ["ok"]),
        ({"power.limit": "[N/A]", "power.default_limit": "[N/A]", "mig.mode.current": "[N/A]"}, ["ok"]),
        ({"persistence_mode": "Disabled"}, ["slow"]),
        ({"power.limit": "450.00"}, ["slow"]),
        ({"clocks_throttle_reasons.hw_slowdown": "Active"}, ["slow"]),
        ({"clocks_throttle_reasons.sw_power_cap": "Active"}, ["slow"]),
        ({"mig.mode.current": "Enabled"}, ["note"]),
        ({"persistence_mode": "Disabled", "power.limit": "450.00"}, ["slow", "slow"]),
    ],
)
def test_faults_of_a_gpu(faults: dict[str, str], expected: list[str]) -> None:
    row = ", ".join({**GPU, **faults}[name] for name in gpu.FIELDS)
    assert verdicts(gpu.check_gpus(row + "\n", "")) == expected
    assert verdicts(gpu.check_gpus(f"{row}\n{row}\n", "")) == expected * 2


def test_a_driver_that_does_not_answer_is_a_fault() -> None:
    assert verdicts(gpu.check_gpus("", "")) == ["slow"]


def test_gpus_that_cannot_reach_each_other_are_named() -> None:
    assert gpu.check_peers(1, lambda a, b: False) == []
    assert verdicts(gpu.check_peers(4, lambda a, b: True)) == ["ok"]
    (found,) = gpu.check_peers(3, lambda a, b: (a, b) != (2, 1))
    assert found.verdict == "slow" and "1-2" in found.found and "0-1" not in found.found


def test_programs_on_a_gpu_are_named() -> None:
    row = ", ".join(GPU[name] for name in gpu.FIELDS)
    found = gpu.check_gpus(row, "4242, /usr/bin/python3, 1234\n")
    assert verdicts(found) == ["ok", "slow"] and "/usr/bin/python3 (pid 4242, 1234 MB)" in found[1].found


@pytest.mark.parametrize(
    ("build", "has_gpu", "expected"),
    [
        (TorchBuild("2.13.0+cpu", None, False, True), False, ["ok"]),
        (TorchBuild("2.13.0+cpu", None, False, True), True, ["slow"]),
        (TorchBuild("2.13.0", "13.0", False, True), True, ["slow"]),
        (TorchBuild("2.13.0", "13.0", True, True), True, ["ok"]),
    ],
)
def test_torch_fits_the_machine(build: TorchBuild, has_gpu: bool, expected: list[str]) -> None:
    assert verdicts(install.check_torch(build, has_gpu)) == expected


def test_kernel_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(install.check_kernel_cache(tmp_path / "not" / "there")) == ["note"]
    (tmp_path / "kernel").touch()
    assert verdicts(install.check_kernel_cache(tmp_path)) == ["ok"]
    monkeypatch.setattr(os, "access", lambda *asked: False)
    assert verdicts(install.check_kernel_cache(tmp_path)) == ["slow"]


def test_missing_packages_name_the_extra_that_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "installed", lambda name: None if name == "gguf" else "1.0")
    (found,) = install.check_packages()
    assert found.verdict == "note" and found.remedy == 'pip install "soloist[gguf]"'


def test_a_report_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(traffic.PROBE_BYTES, "cpu", 1 << 22)
    model = write_checkpoint(tmp_path, "llama")
    assert main(["doctor", "-m", str(model), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    topics = {finding["topic"] for finding in record["findings"]}
    assert topics >= {"CPU load", "CPU threads", "CPU clock", "CPU instructions", "memory", "torch", "CPU memory rate"}
    assert record["slow"] == sum(finding["verdict"] == "slow" for finding in record["findings"])
    monkeypatch.setenv("OMP_NUM_THREADS", "3000")
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "SLOW  CPU threads       3000 threads (OMP_NUM_THREADS=3000)" in text and "-> --threads" in text
