"""Shared fixtures. Everything here runs on the CPU in seconds, without network."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(2)
