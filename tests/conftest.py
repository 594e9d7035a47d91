"""Shared fixtures. Everything here runs on the CPU in seconds, without network."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The models of the tests are so small that threads wait for each other longer than they work, and on a busy machine
# hundreds of times longer.
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
