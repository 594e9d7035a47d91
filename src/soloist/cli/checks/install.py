"""What is installed: torch for this machine, optional packages, the folder of compiled kernels."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from soloist.cli.checks.finding import Finding, note, ok, slow
from soloist.cli.version import installed

OPTIONAL = {
    "prompt_toolkit": ("chat", "line editing in `soloist chat`"),
    "gguf": ("gguf", "reading .gguf files"),
    "huggingface_hub": ("hub", "models by their hub id"),
}
"""Package -> extra that brings it, what it is for."""


@dataclass(frozen=True)
class TorchBuild:
    """cuda: version it was built for; sees_gpu: whether it can use one; mkl: whether it has Intel's matrix library."""

    version: str
    cuda: str | None
    sees_gpu: bool
    mkl: bool


def read_torch() -> TorchBuild:
    import torch

    has_mkl = torch.backends.mkl.is_available()
    return TorchBuild(torch.__version__, torch.version.cuda, torch.cuda.is_available(), has_mkl)


def check_torch(build: TorchBuild, has_gpu: bool) -> list[Finding]:
    """has_gpu: whether the machine has an NVIDIA GPU."""
    found, topic = [], "torch"
    if has_gpu and build.cuda is None:
        found.append(slow(topic, f"{build.version} is built without CUDA, but there is a GPU",
                          "install a CUDA build of torch: pytorch.org lists the command"))  # fmt: skip
    elif has_gpu and not build.sees_gpu:
        found.append(slow(topic, f"{build.version} (CUDA {build.cuda}) cannot use the GPU",
                          "update the NVIDIA driver, or install torch for an older CUDA"))  # fmt: skip
    if not build.mkl and platform.machine() in ("x86_64", "AMD64"):
        found.append(slow(topic, f"{build.version} has no MKL: matrix products on this CPU are slower",
                          "install torch from its own wheels instead of a distribution's package"))  # fmt: skip
    return found or [ok(topic, f"{build.version}, {f'CUDA {build.cuda}' if build.sees_gpu else 'on the CPU'}")]


def check_packages() -> list[Finding]:
    missing = {name: OPTIONAL[name] for name in OPTIONAL if installed(name) is None}
    if not missing:
        return [ok("packages", "all optional packages are installed")]
    return [
        note("packages", f"{name} is not installed; it is for {purpose}", f'pip install "soloist[{extra}]"')
        for name, (extra, purpose) in missing.items()
    ]


def check_kernel_cache(folder: Path) -> list[Finding]:
    """Where Triton keeps compiled kernels: a cold or read-only folder makes every first round wait."""
    topic, there = "kernel cache", folder
    while not there.exists():
        there = there.parent
    if not os.access(there, os.W_OK):
        return [slow(topic, f"{folder} cannot be written: kernels are compiled anew at every start",
                     "make it writable, or set TRITON_CACHE_DIR to a folder that is")]  # fmt: skip
    if not folder.exists() or not any(folder.iterdir()):
        return [note(topic, f"{folder} is empty: the first start compiles kernels", "start once before you measure")]
    return [ok(topic, str(folder))]
