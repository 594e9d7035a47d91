"""Triton kernels of the ops, registered for CUDA devices. Imported when the first op meets a CUDA tensor.

Rules for every kernel here:
- A row's bits do not depend on the window's width T: rows are padded to one tile size, sums run in one order, and a
  split over the context lies at fixed positions.
- `depend(PDL)` stands after the loads of weights, tables and states of earlier rounds, and before the first load of
  anything that this round wrote; every kernel of the chain executes it.
- Sizes that are not powers of two are masked. bf16 on the GPU; tests run the same kernels in fp32 through Triton's interpreter.
"""

from importlib import import_module

MODULES = (
    "rms_norm", "linear", "moe", "kda", "pick", "pick_part", "finish", "begin", "ngram", "width",
    "mla", "gqa", "kda_prefill", "mla_prefill", "row_steps", "route", "moe_experts", "cuda",
)  # fmt: skip

for _module in MODULES:
    import_module(f"soloist.ops.gpu.{_module}")
