"""What is read from the machine, and what GPU samples amount to."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from soloist.bench.flags import find_flags
from soloist.bench.machine import SAMPLED, Conditions, git_state, read_machine
from soloist.bench.view import conditions_table, machine_table
from tests.bench_runs import CARD, MACHINE, noisy_run


def sampled(*rows: tuple[float, float, float, str]) -> Conditions:
    """Samples as (time, clock, watts, reason to throttle)."""
    found = Conditions()
    for t, clock, watts, cap in rows:
        values = ("0", f"{clock:.0f}", "2619", "40", f"{watts:.2f}", "Not Active", "Not Active", cap)
        found.samples.append((t, dict(zip(SAMPLED, values, strict=True))))
    return found


def test_energy_is_power_times_time_and_unknown_from_few_samples() -> None:
    steady = sampled(*((t / 5, 1980, 300, "Not Active") for t in range(50)))
    assert steady.energy_j(2.0, 6.0) == pytest.approx(1200)
    assert steady.energy_j(2.0, 2.5) is None and Conditions().energy_j(0, 10) is None


def test_extremes_of_the_clock_are_kept_with_what_held_it_down() -> None:
    idle, fast, held = (0, 300, 90, "Not Active"), (1, 1980, 600, "Not Active"), (2, 1500, 690, "Active")
    found = sampled(idle, fast, held, (3, 1950, 600, "Not Active"))
    conditions = found.extremes(0.5, 5)
    assert [c.clock_mhz for c in conditions] == [(1500.0,), (1980.0,), (1500.0,)]
    assert conditions[0].throttle == ("power cap",) and conditions[1].throttle == ()
    assert Conditions().extremes(0, 5) == []


def test_the_machine_is_named() -> None:
    found = read_machine(3)
    assert found.threads == 3 and found.cores >= 1 and found.versions["torch"] and found.versions["numpy"]
    with Conditions() as conditions:
        now = conditions.read()
    assert now.t_s >= 0.3 and (now.load is None or now.load >= 0)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


CPU, RAPL = "sys/devices/system/cpu", "sys/class/powercap/intel-rapl:0"
BARE = {
    f"{CPU}/cpu0/cpufreq/scaling_governor": "powersave\n", f"{CPU}/cpu0/cpufreq/scaling_cur_freq": "3400000\n",
    f"{CPU}/cpu1/cpufreq/scaling_cur_freq": "1200000\n", f"{CPU}/cpu0/thermal_throttle/core_throttle_count": "4\n",
    f"{CPU}/cpu0/thermal_throttle/package_throttle_count": "3\n", f"{RAPL}/energy_uj": "9000000\n",
    f"{RAPL}/max_energy_range_uj": "10000000\n", f"{RAPL}/intel-rapl:0:0/energy_uj": "500\n",
    "proc/meminfo": "MemTotal: 1024 kB\n", "proc/loadavg": "0.25 0.1 0.1 1/9 9\n",
}  # fmt: skip
"""Of a machine that is not virtual."""


def test_a_cpu_tells_its_clock_its_heat_and_its_energy(tmp_path: Path) -> None:
    write(tmp_path, BARE)
    machine, conditions = read_machine(1, tmp_path), Conditions(None, tmp_path)
    assert machine.governor == "powersave"
    assert not {"governor", "cpu_clock_mhz", "cpu_throttled", "cpu_energy", "memory_bytes"} & set(machine.unknown)
    mark, first = conditions.mark(), conditions.read()
    assert (first.cpu_clock_mhz, first.cpu_throttled, first.load) == ((1200.0, 3400.0), 7, 0.25)
    write(tmp_path, {f"{RAPL}/energy_uj": "9500000", f"{CPU}/cpu0/thermal_throttle/core_throttle_count": "6"})
    assert conditions.energy_since(mark) == pytest.approx(0.5)
    write(tmp_path, {f"{RAPL}/energy_uj": "250000"})  # the counter began anew
    assert conditions.energy_since(mark) == pytest.approx(1.25)
    assert Conditions((), tmp_path).energy_since(mark) is None  # what a CPU takes while GPUs compute is not the model's
    heat = find_flags(CARD, MACHINE, (first, conditions.read()), (), (), False, False)
    assert [(f.kind, f.detail) for f in heat] == [("throttled", "heat held a CPU down 2 times")]
    assert not find_flags(CARD, MACHINE, (first, first), (), (), False, False)


def test_what_a_machine_does_not_tell_has_its_reason_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = read_machine(1, tmp_path)
    assert {"governor", "cpu_clock_mhz", "cpu_throttled", "cpu_energy", "memory_bytes", "driver"} <= set(machine.unknown)
    silent = Conditions(None, tmp_path).read()
    found = dataclasses.replace(noisy_run(1), machine=machine, conditions=(silent, silent))
    rows = {name: value for table in (machine_table(found), conditions_table(found)) for name, value in table.rows}
    for name, reason in (("governor", "no governor"), ("versions.driver", "no nvidia-smi"), ("memory_bytes", "no /proc/meminfo"),
                         ("GPU clock, MHz", "no nvidia-smi"), ("CPU clock, MHz", "virtual"), ("CPU energy", "RAPL"),
                         ("CPU held down by heat, times", "does not count")):  # fmt: skip
        assert reason in rows[name], (name, rows[name])
    assert not any(value in ("-", "None", "") for value in rows.values()), rows


DRIVER = """#!/bin/bash
for word in "$@"; do
    [[ $word == --query-compute-apps=* ]] && exit 0
    [[ $word == -i ]] && chosen=1
    [[ $word == GPU-absent ]] && { echo "No devices were found"; exit 6; }
    [[ $word == -lms ]] && loop=1
    if [[ $word == --query-gpu=* ]]; then
        [[ $word == *KNOWN* ]] || { echo "Field is not a valid field to query."; exit 2; }
        IFS=, read -ra fields <<< "${word#*=}"
    fi
done
print() {
    for gpu in 0 ${chosen:-1}; do
        [[ $gpu == 0 || -z $chosen ]] || continue
        line=
        for field in "${fields[@]}"; do
            case $field in
                index) value=$gpu ;; clocks.sm) value=$((1980 - 1635 * gpu)) ;; *KNOWN*) value="Not Active" ;; *) value=40 ;;
            esac
            line+="${line:+, }$value"
        done
        echo "$line"
    done
}
print
while [[ $loop ]]; do sleep 0.05; print; done
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("known, gpus, clocks", [
    ("clocks_throttle_reasons", (), (1980.0, 345.0)), ("clocks_event_reasons", (), (1980.0, 345.0)),
    ("clocks_event_reasons", ("GPU-7",), (1980.0,)), ("something_new", (), ()), ("clocks_event_reasons", ("GPU-absent",), ()),
    ("clocks_event_reasons", None, ()),
])  # fmt: skip
def test_gpus_are_read_by_the_words_that_the_driver_knows(
    known: str, gpus: tuple[str, ...] | None, clocks: tuple[float, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the driver's program; the GPU that does not compute idles at 345 MHz."""
    (tmp_path / "nvidia-smi").write_text(DRIVER.replace("KNOWN", known))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with Conditions(gpus) as conditions:
        for _ in range(100 if clocks else 1):
            if len(conditions.samples) >= 2:
                break
            time.sleep(0.05)
        found = conditions.read()
    assert found.clock_mhz == clocks and found.throttle == ()
    assert len(read_machine(1).gpus) == (0 if known == "something_new" else 2)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc")
def test_work_of_other_programs_is_seen_and_our_own_is_not(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    stat, tick = tmp_path / "proc/stat", os.sysconf("SC_CLK_TCK")
    stat.write_text("cpu  1000 0 0 9 9 0 0 0 0 0\n")
    conditions, begun, own = Conditions(None, tmp_path), time.perf_counter(), time.process_time()
    while time.perf_counter() < begun + 0.2:
        pass
    ours = (time.process_time() - own) * tick
    stat.write_text(f"cpu  {1000 + ours:.0f} 0 0 9 9 0 0 {2 * 0.2 * tick:.0f} 0 0\n")
    assert conditions.read().other_cores == pytest.approx(2, abs=0.4)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_only_code_under_version_control_has_a_commit(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        done = subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "__init__.py").write_text("")
    assert git_state(tmp_path) == (None, None)  # installed beside somebody's repository
    git("add", ".")
    git("commit", "-qm", "one")
    assert git_state(tmp_path) == (git("rev-parse", "HEAD"), False)
    (tmp_path / "__init__.py").write_text("x = 1\n")
    assert git_state(tmp_path)[1] is True
