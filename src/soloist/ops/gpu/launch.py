"""Launching Triton kernels, with programmatic dependent launch (PDL) decided in one place.

A kernel launched with PDL starts while the one ahead is still draining. It may load weights at once and must execute
`depend` before it reads what earlier kernels of the round wrote.
Source: CUDA C++ Programming Guide, programmatic dependent launch; Triton's `launch_pdl`.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

_OPTIONS = ("num_warps", "num_stages", "maxnreg")

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
    """Triton 3.6's interpreter takes loop bounds from arrays of one element, which numpy 2.4 refuses to convert."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_tensor_and_index


@triton.jit
def depend(PDL: tl.constexpr):
    """Wait until the kernels ahead have written their results, then let the next kernel be scheduled."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def has_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch came with compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU. The interpreter counts as four, so that small cases loop too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


CARVEOUT = 100
"""Percent of a multiprocessor's memory that is shared memory, the same for all kernels: a multiprocessor changes it only
while nothing runs there, so a kernel that wants another share cannot begin beside the one ahead.
"""


@cache
def divide_memory(function: int) -> None:
    """Ask for that share for a loaded kernel, given by the driver's handle."""
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    driver.cuFuncSetAttribute(driver.CUfunction(function), attribute, CARVEOUT)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, device: torch.device, **meta: Any) -> None:
    """Run kernel[grid](*args, PDL=..., **meta). Tensors lie on `device`; on a CPU the kernel must be interpreted.

    Without contraction of products and sums, which the compiler may decide in another way in each copy of an unrolled loop.
    """
    pdl = has_pdl(device)
    if isinstance(kernel, InterpretedFunction):
        meta = {name: value for name, value in meta.items() if name not in _OPTIONS}
        kernel[grid](*args, PDL=False, **meta)
        return
    compiled = kernel[grid](*args, PDL=pdl, launch_pdl=pdl, enable_fp_fusion=False, **meta)
    divide_memory(compiled.function)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1
