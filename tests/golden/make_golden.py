"""Make the golden files anew: `python -m tests.golden.make_golden`. Needs the `oracle` extra (transformers).

A text on which choices are so close that round-off could turn them is not taken: comparing them exactly would be luck.
"""

from __future__ import annotations

import datetime
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.golden.cases import FOLDER, KINDS, NAIVE_ONLY, draw_text, fingerprint
from tests.golden.oracle import Record, record

CLOSE = 5e-5
"""Smallest lead of a greedy choice (logits) or of a chosen expert (scores) that round-off cannot turn."""


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    checkpoints = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            found, margin = clear_record(kind, Path(folder) / kind)
            np.savez_compressed(FOLDER / f"{kind}.npz", **found)
            checkpoints[kind] = {"fingerprint": fingerprint(kind), "margin": margin, "from": _source(kind)}
            print(f"{kind:16} {sum(v.nbytes for v in found.values()):8,} bytes, margin {margin:.1e}")
    provenance = {
        "made": datetime.date.today().isoformat(),
        "with": {"transformers": transformers.__version__, "torch": torch.__version__, "numpy": np.__version__},
        "how": "fp32, eager attention, CPU, one thread; naive: tests/naive_ling.py, fp64",
        "checkpoints": checkpoints,
    }
    (FOLDER / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n")


def clear_record(kind: str, folder: Path) -> tuple[Record, float]:
    """The record of the first text on which no choice is close, and its smallest lead."""
    for attempt in range(100):
        found = record(kind, folder, draw_text(kind, attempt))
        margin = float(found.pop("margin"))
        if margin > CLOSE:
            return found, margin
    raise SystemExit(f"{kind}: every text has choices closer than {CLOSE:.0e}")


def _source(kind: str) -> str:
    if kind in NAIVE_ONLY:
        return "naive"
    if kind == "ling-clamped":
        return "transformers, with Step-3.7's clamped feed-forwards"
    return "transformers; MTP naive" if kind == "ling-mtp" else "transformers"


if __name__ == "__main__":
    main()
