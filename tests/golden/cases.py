"""What is compared: the checkpoints, the texts, which rows are stored, and when two results count as equal."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from soloist.testing.checkpoints import random_tensors
from soloist.testing.configs import CONFIGS

FOLDER = Path(__file__).parent
KINDS = tuple(CONFIGS)
LING = tuple(kind for kind in KINDS if kind.startswith("ling"))
NAIVE_ONLY = ("ling-tail",)
"""Transformers cannot run these; their golden files come from the naive implementation alone."""

LENGTH, PROMPT = 150, 100
"""Tokens of the text: more than two KDA chunks (64) and than a page (128). Decoding starts after PROMPT of them."""

ROWS = (0, 1, 2, 3, 4, 15, 16, 31, 62, 63, 64, 65, 99, 100, 101, 112, 126, 127, 128, 129, 148, 149)
"""Rows whose logits and layer outputs are stored: the borders of blocks, chunks and pages, and a few between."""

GREEDY_PROMPTS, GREEDY_TOKENS = (1, 20, 125), 24
"""Lengths of the prompts that are continued greedily, and by how much; the last one decodes across a page border."""

WHOLE_LIMIT, ROW_LIMIT, MAX_LIMIT = 1e-5, 2e-5, 1e-4
"""Most relative error of all values together, of one row, and of one value against the largest."""


def draw_text(kind: str, attempt: int) -> torch.Tensor:
    """Token ids [LENGTH] to make a golden file from."""
    stream = hashlib.shake_256(f"{kind} {attempt}".encode()).digest(LENGTH)
    return torch.tensor([byte % 98 for byte in stream])


def config_of(kind: str) -> dict[str, Any]:
    return {**CONFIGS[kind], "torch_dtype": "float32"}


def fingerprint(kind: str) -> str:
    """Changes if and only if the checkpoint's settings or weights do."""
    config = config_of(kind)
    digest = hashlib.sha256(repr(sorted(config.items())).encode())
    for name, values in sorted(random_tensors(config).items()):
        digest.update(name.encode() + values.tobytes())
    return digest.hexdigest()[:16]


@cache
def golden(kind: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{kind}.npz") as file:
        return dict(file)


def text(kind: str) -> torch.Tensor:
    """The token ids [LENGTH] of a golden file."""
    return torch.from_numpy(golden(kind)["text"].astype(np.int64))


@dataclass(frozen=True)
class Difference:
    """Relative errors of found [rows, N] against expected [rows, N]."""

    whole: float
    row: float
    largest: float

    @property
    def small(self) -> bool:
        return self.whole <= WHOLE_LIMIT and self.row <= ROW_LIMIT and self.largest <= MAX_LIMIT


def difference(found: Any, expected: Any) -> Difference:
    """NaN anywhere makes it large."""
    found, expected = (np.asarray(values, dtype=np.float64) for values in (found, expected))
    assert found.shape == expected.shape, (found.shape, expected.shape)
    gap, rows = found - expected, np.linalg.norm(expected, axis=-1)
    return Difference(
        whole=float(np.linalg.norm(gap) / np.linalg.norm(expected)),
        row=float((np.linalg.norm(gap, axis=-1) / rows).max()),
        largest=float(np.abs(gap).max() / np.abs(expected).max()),
    )


def assert_equal(found: Any, expected: Any, what: str) -> None:
    d = difference(found, expected)
    assert d.small, f"{what}: {d}"
