"""The CUDA kernels compile where nvcc is: no GPU is needed. What the compiler says of them is held to."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from soloist.ops.gpu.cuda.linear import GATED, NORM, PLAIN, pieces  # noqa: E402
from soloist.ops.gpu.cuda.program import defines_text, source_of  # noqa: E402

NVCC = shutil.which("nvcc")
pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine")

MOST_REGISTERS, MOST_SPILLED = 128, 64
"""Two blocks of 256 threads must fit a multiprocessor, so that a kernel may begin while the one ahead ends."""


def product(K: int, T: int, prologue: int, **more: Any) -> dict[str, Any]:
    halves = -(-T // 8)
    return {"K": K, "WARPS": 8, "HALVES": halves, "PROLOGUE": prologue, "DIRECT": False, "BRANCH": prologue == NORM,
            "BIAS": False, "PAIRS": False, "WIDE_OUT": False, "HEAD": 128, **pieces(K, 8, halves, 5), **more}  # fmt: skip


def experts(T: int, D: int, F: int, E: int, groups: int) -> dict[str, Any]:
    halves = -(-T // 8)
    return {"D": D, "F": F, "E": E, "GROUPS": groups, "TOP_GROUPS": max(1, groups // 2), "TOP_K": 8, "SIGMOID": True,
            "HAS_BIAS": True, "NORMALISE": True, "SCALING": 2.5, "SHARED": True, "WIDE_ROUTER": True, "HALVES": halves,
            **pieces(D, 8, halves, 2)}  # fmt: skip


CASES = {
    "norm-1": ("linear", product(1536, 1, NORM)),
    "gate-up-16": ("linear", product(1536, 16, NORM, PAIRS=True)),
    "gated-1": ("linear", product(2048, 1, GATED)),
    "plain-deep-8": ("linear", product(9728, 8, PLAIN, DIRECT=True, WIDE_OUT=True)),
    "moe-tiny-1": ("moe", experts(1, 1536, 512, 128, 8)),
    "kda": ("kda", {"H": 16}),
    "mla-tiny-16": ("mla", {"H": 16, "N": 128, "DR": 64, "R": 512, "DV": 128, "STEP": 2, "HALVES": 2, "STAGES": 2}),
}


def compiled(name: str, defines: dict[str, Any], folder: Path, architecture: str) -> tuple[Path, str]:
    """(the machine code, the assembler's report)."""
    source, image = folder / "kernel.cu", folder / "kernel.cubin"
    pdl = architecture == "sm_90"
    source.write_text(defines_text({**defines, "PDL": pdl}) + source_of(name))
    flags = [f"-arch={architecture}", "-std=c++17", "-fmad=false", "-cubin", "-Xptxas", "-v"]
    command = [str(NVCC), *flags, "-o", str(image), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return image, done.stderr


@pytest.mark.parametrize(("source", "defines"), CASES.values(), ids=CASES)
def test_kernels_leave_room_for_the_next_one(source: str, defines: dict[str, Any], tmp_path: Path) -> None:
    _, report = compiled(source, defines, tmp_path, "sm_90")
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", report)]
    allowed = 160 if source == "mla" else MOST_REGISTERS  # attention has a multiprocessor to itself
    assert registers and max(registers) <= allowed, report
    assert max(spilled) <= MOST_SPILLED, report


@pytest.mark.parametrize("name", ["norm-1", "kda"])
def test_weights_are_asked_for_before_the_wait(name: str, tmp_path: Path) -> None:
    """The assembler may move a load below the wait of programmatic dependent launch, and did so with constant loads."""
    nvdisasm = shutil.which("nvdisasm") or _of_triton("nvdisasm")
    if nvdisasm is None:
        pytest.skip("nothing here reads machine code")
    image, _ = compiled(*CASES[name], tmp_path, "sm_90")
    listing = subprocess.run([nvdisasm, str(image)], capture_output=True, text=True, timeout=100, check=True).stdout
    before, wait, behind = listing.partition("ACQBULK")
    assert wait and before.count("LDG.E") >= 8 and "LDG" in behind


def test_kernels_compile_for_ampere(tmp_path: Path) -> None:
    compiled(*CASES["norm-1"], tmp_path, "sm_80")


def _of_triton(tool: str) -> str | None:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return str(path) if path.is_file() else None
