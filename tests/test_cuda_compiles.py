"""The CUDA kernels compile where nvcc is: no GPU is needed. What the compiler says of them is held to."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from soloist.ops.gpu.cuda import program  # noqa: E402
from soloist.ops.gpu.cuda.linear import GATED, NORM, PLAIN, tile_rows  # noqa: E402
from soloist.ops.gpu.cuda.program import defines_text, source_of  # noqa: E402

NVCC = shutil.which("nvcc")
pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine")

MOST_REGISTERS, MOST_SPILLED = 112, 160
"""Two blocks of 288 threads must fit a multiprocessor, so that a kernel may begin while the one ahead ends."""


def product(K: int, N: int, T: int, prologue: int, **more: Any) -> dict[str, Any]:
    return {"K": K, "TILE_ROWS": tile_rows(N, 132), "HALVES": -(-T // 8), "PROLOGUE": prologue, "DIRECT": False,
            "BRANCH": prologue == NORM, "BIAS": False, "PAIRS": False, "WIDE_OUT": False, "HEAD": 128, **more}  # fmt: skip


def experts(T: int, D: int, F: int, E: int, groups: int) -> dict[str, Any]:
    return {"D": D, "F": F, "E": E, "GROUPS": groups, "TOP_GROUPS": max(1, groups // 2), "TOP_K": 8, "SIGMOID": True,
            "HAS_BIAS": True, "NORMALISE": True, "SCALING": 2.5, "SHARED": True, "WIDE_ROUTER": True, "HALVES": -(-T // 8),
            "DOWN_ROWS": tile_rows(D, 132)}  # fmt: skip


def attention(T: int) -> dict[str, Any]:
    return {"H": 16, "N": 128, "DR": 64, "R": 512, "DV": 128, "STEP": 2, "HALVES": -(-T // 8), "STAGES": 2,
            "QUERY_TILES": min(T, 2)}  # fmt: skip


CASES = {
    "norm-1": ("linear", product(1536, 10256, 1, NORM)),
    "gate-up-16": ("linear", product(1536, 9216, 16, NORM, PAIRS=True)),
    "gated-1": ("linear", product(2048, 1536, 1, GATED)),
    "plain-deep-8": ("linear", product(9728, 2560, 8, PLAIN, DIRECT=True, WIDE_OUT=True)),
    "moe-tiny-1": ("moe", experts(1, 1536, 512, 128, 8)),
    "moe-flash-16": ("moe", experts(16, 2560, 256, 256, 8)),
    "kda": ("kda", {"H": 16}),
    "mla-tiny-1": ("mla", attention(1)),
    "mla-tiny-16": ("mla", attention(16)),
}


def compiled(name: str, defines: dict[str, Any], folder: Path) -> tuple[Path, str]:
    """(the machine code, the assembler's report)."""
    source, image = folder / "kernel.cu", folder / "kernel.cubin"
    source.write_text(defines_text({**defines, "PDL": True}) + source_of(name))
    flags = ["-arch=sm_90", "-std=c++17", "-fmad=false", "-cubin", "-Xptxas", "-v"]
    command = [str(NVCC), *flags, "-o", str(image), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return image, done.stderr


@pytest.mark.parametrize(("source", "defines"), CASES.values(), ids=CASES)
def test_kernels_leave_room_for_the_next_one(source: str, defines: dict[str, Any], tmp_path: Path) -> None:
    _, report = compiled(source, defines, tmp_path)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", report)]
    allowed = 240 if source == "mla" else MOST_REGISTERS  # attention of several rows has a multiprocessor to itself
    assert registers and max(registers) <= allowed, report
    assert max(spilled) <= MOST_SPILLED, report


def test_the_state_is_asked_for_before_the_wait(tmp_path: Path) -> None:
    """The assembler may move a load below the wait of programmatic dependent launch, and did so with constant loads."""
    before, wait, behind = machine_code("kda", tmp_path).partition("ACQBULK")
    assert wait and before.count("LDG.E") >= 8 and "LDG" in behind


def test_no_register_waits_for_a_weight(tmp_path: Path) -> None:
    """The copy engine brings a product's weights to shared memory, and a barrier there tells when they came."""
    code = machine_code("norm-1", tmp_path)
    assert "UBLKCP" in code and "SYNCS.PHASECHK" in code


@pytest.mark.parametrize("name", ["norm-1", "gate-up-16", "moe-tiny-1", "moe-flash-16"])
def test_descriptors_lie_in_pairs_of_registers(name: str, tmp_path: Path) -> None:
    """The assembler made `desc[UR1]` of a copy with a cache hint, which the GPU refused as an illegal instruction."""
    found = [int(n) for n in re.findall(r"desc\[UR(\d+)\]", machine_code(name, tmp_path))]
    assert found and not any(n % 2 for n in found)


def machine_code(name: str, folder: Path) -> str:
    nvdisasm = shutil.which("nvdisasm") or _of_triton("nvdisasm")
    if nvdisasm is None:
        pytest.skip("nothing here reads machine code")
    image, _ = compiled(*CASES[name], folder)
    return subprocess.run([nvdisasm, str(image)], capture_output=True, text=True, timeout=100, check=True).stdout


@pytest.mark.parametrize(("capability", "offered"), [((8, 0), False), ((8, 9), False), ((9, 0), True)])
def test_they_are_for_hopper_on(capability: tuple[int, int], offered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(program, "find_spec", lambda name: object())
    assert program.is_available.__wrapped__(torch.device("cuda")) is offered


def _of_triton(tool: str) -> str | None:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return str(path) if path.is_file() else None
