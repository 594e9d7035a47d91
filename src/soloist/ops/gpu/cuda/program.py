"""CUDA C++ kernels: compiled at run time by NVRTC, kept on disk, launched with programmatic dependent launch.

NVRTC and the driver's bindings come with torch's CUDA wheels (`cuda-bindings`); no toolkit is needed. Where they are
missing, `is_available` is False and the Triton kernels serve alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from soloist.ops.gpu.launch import divide_memory, has_pdl

HERE = Path(__file__).parent
Define = int | float | bool
"""A constant of a kernel: sizes and switches, fixed when it is compiled."""


@cache
def is_available(device: torch.device) -> bool:
    """Whether kernels can be compiled for the device: the copy engine and clusters came with compute capability 9.0."""
    if device.type != "cuda" or find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def source_of(name: str) -> str:
    """The text of `<name>.cu`, headers of this folder put where they are included."""
    return re.sub(r'#include "(\w+\.cuh)"\n', lambda found: (HERE / found[1]).read_text(), (HERE / f"{name}.cu").read_text())


def defines_text(defines: dict[str, Define]) -> str:
    def literal(value: Define) -> str:
        return f"{value!r}f" if isinstance(value, float) else str(int(value))

    return "".join(f"#define {name} {literal(value)}\n" for name, value in sorted(defines.items()))


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel on one device."""

    function: Any
    device: torch.device

    def __call__(self, grid: Sequence[int], threads: int, shared_bytes: int, *args: Any) -> None:
        """Launch on the current stream. Arguments: tensors or None, numpy scalars of the parameters' types."""
        from cuda.bindings import driver

        values = [np.array(argument(arg)) for arg in args]
        places = np.array([value.ctypes.data for value in values], dtype=np.uint64)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = driver.CUstream(torch.cuda.current_stream(self.device).cuda_stream)
        if has_pdl(self.device):
            early = driver.CUlaunchAttribute()
            early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            early.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [early], 1
        checked(driver.cuLaunchKernelEx(config, self.function, places.ctypes.data, 0))


def argument(value: Any) -> np.generic:
    """A kernel parameter: an address, or a numpy scalar as it is. Other numbers have no certain type."""
    if value is None:
        return np.uint64(0)
    if isinstance(value, torch.Tensor):
        return np.uint64(value.data_ptr())
    assert isinstance(value, np.generic), type(value)
    return value


@cache
def kernel(source: str, entry: str, shared_bytes: int, device: torch.device, **defines: Define) -> Kernel:
    """The entry of a source with these constants, which may ask for so much dynamic shared memory."""
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(device)
    defines = {**defines, "PDL": has_pdl(device)}
    image = compiled(defines_text(defines) + source_of(source), f"sm_{major}{minor}")
    with torch.cuda.device(device):
        torch.cuda.current_stream(device)
        module = checked(driver.cuModuleLoadData(image))
        function = checked(driver.cuModuleGetFunction(module, entry.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
        divide_memory(int(function))
    return Kernel(function, device)


def compiled(text: str, architecture: str) -> bytes:
    """Machine code for an architecture, from the disk where it was compiled before."""
    from cuda.bindings import nvrtc

    version = checked(nvrtc.nvrtcVersion())
    key = hashlib.sha256(f"{version} {architecture}\n{text}".encode()).hexdigest()
    path = cache_folder() / f"{key}.cubin"
    if path.is_file():
        return path.read_bytes()
    image = compile_now(text, architecture)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(image)
    os.replace(file.name, path)
    return image


def compile_now(text: str, architecture: str) -> bytes:
    """Raises: RuntimeError with the compiler's log."""
    from cuda.bindings import nvrtc

    program = checked(nvrtc.nvrtcCreateProgram(text.encode(), b"soloist.cu", 0, [], []))
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17", b"--fmad=false"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(program))
        checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"a CUDA kernel does not compile for {architecture}:\n{log.decode()}")
    image = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    checked(nvrtc.nvrtcGetCUBIN(program, image))
    return image


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "soloist" / "kernels"


def checked(result: tuple[Any, ...]) -> Any:
    """What a call of the bindings returned beside its status.   Raises: RuntimeError for a status that is not success."""
    status, *values = result
    if status.value != 0:
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
