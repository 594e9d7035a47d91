"""The same card twice, and a third time with every round made 5 % slower: does `soloist bench compare` tell them apart?

    python benchmarks/repeatability.py [--folder benchmarks/runs] [--slowdown 0.05]

nano, plain and NEXTN, twelve prompts three times, each run in a process of its own, a quarter of a minute apart at most. Run it
on a machine that does nothing else. Exit code 1 unless the two like runs overlap in every interval of TPOT and compare as
equal, and the slow one is found slower than both.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from soloist.bench.card import load_card
from soloist.bench.compare import compare
from soloist.bench.files import read_run
from soloist.bench.records import RunFile
from soloist.bench.run import run_card
from soloist.bench.table import comparison_lines, run_lines
from soloist.runtime.runner import EagerRunner

CHANGES = ("name=repeatability", "repeats=3", "output_tokens=48")
VARIANTS = ("n-gram", "DSpark")
"""Of the preset demo, those that are left out."""


def slow_down(share: float) -> None:
    """Every round takes so much longer. A clock that spins, because a sleep of half a millisecond lasts longer."""
    launch = EagerRunner.launch

    def slowed(self: EagerRunner, *args: Any, **kwargs: Any) -> None:
        begun = time.perf_counter()
        launch(self, *args, **kwargs)
        end = time.perf_counter() + share * (time.perf_counter() - begun)
        while time.perf_counter() < end:
            pass

    EagerRunner.launch = slowed  # type: ignore[method-assign]


def measure(output: Path, slowdown: float) -> None:
    """One run of the card in this process."""
    from soloist.bench.prepare import narrowed

    if slowdown:
        slow_down(slowdown)
    card = load_card("demo", CHANGES)
    kept = [variant.name for variant in card.variants if variant.name not in VARIANTS]
    print("\n".join(run_lines(run_card(narrowed(card, kept), output, f"benchmarks/repeatability.py, slowdown {slowdown:g}"))))


def overlap(a: RunFile, b: RunFile) -> bool:
    """Whether the intervals of TPOT have a value in common, for every variant."""
    pairs = [(x.distributions["tpot_ms"], y.distributions["tpot_ms"]) for x, y in zip(a.summaries, b.summaries, strict=True)]
    known = [(x.low, x.high, y.low, y.high) for x, y in pairs]
    return all(None not in each and each[0] <= each[3] and each[2] <= each[1] for each in known)  # type: ignore[operator]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("."), metavar="DIR", help="where the three runs go")
    parser.add_argument("--slowdown", type=float, default=0.05, metavar="X", help="of the third run (default 0.05)")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        measure(args.one, args.slowdown)
        return 0
    paths = [args.folder / f"repeatability-{name}-cpu.json" for name in ("first", "second", "slowed")]
    for path, slowdown in zip(paths, (0.0, 0.0, args.slowdown), strict=True):
        subprocess.run([sys.executable, __file__, "--one", str(path), "--slowdown", str(slowdown)], check=True)
    first, second, slowed = map(read_run, paths)
    good = overlap(first, second)
    print(f"\nintervals of the like runs {'overlap' if good else 'DO NOT overlap'}")
    for a, b, worse in ((first, second, 0), (first, slowed, 1), (second, slowed, 1)):
        found = compare(a, b)
        print("\n".join(["", *comparison_lines(found), f"exit code {found.code}, expected {worse}"]))
        good = good and found.code == worse
    print(f"\n{'as it must be' if good else 'NOT as it must be'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
