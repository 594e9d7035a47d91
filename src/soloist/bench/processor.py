"""What Linux tells of a CPU's clock, of its being held down by heat, and of its energy. Virtual machines mostly tell nothing."""

from __future__ import annotations

from pathlib import Path


def clocks_mhz(root: Path) -> tuple[float, ...]:
    """Of the slowest and the fastest CPU now; nothing where no driver steers them."""
    files = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq")
    clocks = [khz / 1e3 for file in files if (khz := _number(file)) is not None]
    return (min(clocks), max(clocks)) if clocks else ()


def times_throttled(root: Path) -> int | None:
    """How often heat has held a core or a package down since the system began, None where nobody counts."""
    files = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/*_throttle_count")
    counts = [count for file in files if (count := _number(file)) is not None]
    return sum(counts) if counts else None


class EnergyMeter:
    """The energy that all CPU packages have taken since it was made, from the running counters of RAPL."""

    def __init__(self, root: Path):
        folders = sorted((root / "sys/class/powercap").glob("intel-rapl:[0-9]"))  # AMD's too; intel-rapl:0:0 is a part of :0
        self._counters = [folder for folder in folders if _number(folder / "energy_uj") is not None]
        self._last = [self._read(folder) for folder in self._counters]
        self._total_uj = 0

    def read_j(self) -> float | None:
        """None where there is no counter, or root alone may read it. Between two calls a counter may begin anew once."""
        for place, folder in enumerate(self._counters):
            now, before = self._read(folder), self._last[place]
            size = _number(folder / "max_energy_range_uj") or 0
            self._total_uj += now - before + (size if now < before else 0)
            self._last[place] = now
        return self._total_uj / 1e6 if self._counters else None

    @staticmethod
    def _read(folder: Path) -> int:
        return _number(folder / "energy_uj") or 0


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
