"""The kernels that weigh most, in CUDA C++. They register themselves over the Triton ones and leave them what they do not do."""

from soloist.ops.gpu.cuda import kda, linear, mla, moe  # noqa: F401
