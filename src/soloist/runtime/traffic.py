"""The floor of the time per token: the bytes that one token needs, over the bytes a second that memory delivers."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from soloist.config import ModelConfig, MoeConfig
from soloist.dist.group import SOLO, Group
from soloist.models.decoder import Decoder
from soloist.state.sequence import CacheSpec, PagedSpec

PROBE_BYTES = {"cpu": 1 << 29, "cuda": 1 << 31}
"""Far above the last cache of either."""


@dataclass(frozen=True)
class Traffic:
    """What plain decoding of one token moves. state_bytes: caches read, and matrices read and written, at `context`."""

    active_parameters: int
    weight_bytes: int
    context: int
    state_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.state_bytes


def token_traffic(config: ModelConfig, dtype: torch.dtype, context: int, group: Group = SOLO) -> Traffic:
    """Count from shapes alone, for one rank of a group. Of experts the chosen share counts, of an untied embedding one
    row, of MTP nothing.
    """
    decoder = Decoder(config, dtype, torch.device("meta"), group)
    weight_bytes = active = 0.0
    for name, weight in decoder.named_parameters():
        used = weight.numel() * _used_share(name, config)
        active += used
        weight_bytes += used * weight.element_size()
    state_bytes = sum(_state_bytes(spec, context) for spec in decoder.cache_specs())
    return Traffic(round(active), round(weight_bytes), context, state_bytes)


def _used_share(name: str, config: ModelConfig) -> float:
    if name.startswith("mtp."):
        return 0.0
    if name == "embed.weight" and not config.tied_head:
        return 1 / config.vocab_size
    if ".experts." in name:
        mlp = config.blocks[int(name.split(".")[1])].mlp
        assert isinstance(mlp, MoeConfig), name
        return mlp.top_k / mlp.num_experts
    return 1.0


def _state_bytes(spec: CacheSpec, context: int) -> int:
    if isinstance(spec, PagedSpec):
        return spec.heads * spec.width * spec.dtype.itemsize * context
    history = spec.channels * (spec.conv_width - 1) * spec.dtype.itemsize
    return history + 2 * math.prod(spec.state) * torch.float32.itemsize


def read_rate(device: torch.device, seconds: float = 0.3) -> float:
    """Bytes a second that the device reads from its memory, the best of several passes over one large buffer."""
    size = PROBE_BYTES.get(device.type, PROBE_BYTES["cpu"])
    buffer = torch.ones(size // 4, device=device)  # written, or the pages would all be one page of zeros
    pass_s = _pass_s_on_gpu if device.type == "cuda" else _pass_s
    best, end = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end or best == math.inf:
        best = min(best, pass_s(buffer))
    return size / best


def _pass_s(buffer: torch.Tensor) -> float:
    begun = time.perf_counter()
    buffer.sum().item()
    return time.perf_counter() - begun


def _pass_s_on_gpu(buffer: torch.Tensor) -> float:
    """By the device's own clock: the host's would add the launch and the way back."""
    with torch.cuda.device(buffer.device):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        buffer.sum()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
