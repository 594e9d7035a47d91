"""Token mixers: grouped-query attention, gated MLA and KDA. Projections here, the rest in one op each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from soloist.config import GqaConfig, KdaConfig, Mixer, MlaConfig
from soloist.layers.linear import Linear, Slotted, Stream, Vector
from soloist.ops.gqa import gqa
from soloist.ops.kda import kda
from soloist.ops.mla import mla
from soloist.ops.norm_linear import Norm, gated_norm_linear
from soloist.state.sequence import CacheSpec, PagedSpec, Recurrent, RecurrentSpec, Window

Cache = torch.Tensor | Recurrent
Rotation = tuple[torch.Tensor, torch.Tensor]


class MixerLayer(Protocol):
    """What a decoder layer asks of its mixer."""

    def cache_specs(self) -> list[CacheSpec]: ...

    def __call__(
        self, stream: Stream, norm: Norm, window: Window, caches: Sequence[Cache], rotation: Rotation | None
    ) -> Stream:
        """Read the norm of the stream, leave this mixer's branch to be added to it. Writes: the caches."""
        ...


class GqaLayer(torch.nn.Module):
    """Caches: keys, values."""

    def __init__(self, config: GqaConfig, hidden_size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.config, self.eps, self.dtype = config, eps, dtype
        c = config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.qkv = Linear(hidden_size, {"q": q, "k": kv, "v": kv}, dtype, bias=c.qkv_bias)
        self.out = Linear(q, {"weight": hidden_size}, dtype, bias=c.out_bias)
        if c.qk_norm:
            self.q_norm = Vector(c.head_dim, dtype=dtype)
            self.k_norm = Vector(c.head_dim, dtype=dtype)

    def cache_specs(self) -> list[CacheSpec]:
        spec = PagedSpec(self.config.num_kv_heads, self.config.head_dim, self.dtype)
        return [spec, spec]

    def forward(
        self, stream: Stream, norm: Norm, window: Window, caches: Sequence[Cache], rotation: Rotation | None
    ) -> Stream:
        c = self.config
        assert rotation is not None
        keys, values = caches
        assert isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor)
        norms = (self.q_norm.weight, self.k_norm.weight, self.eps) if c.qk_norm else None
        qkv, residual = self.qkv.after(stream, norm)
        o = gqa(qkv.view(qkv.shape[0], -1, c.head_dim), norms, rotation, c.rope.interleaved, window.pages(keys),
                window.pages(values), window.place, c.scale)  # fmt: skip
        return Stream(residual, self.out(o))


class MlaLayer(torch.nn.Module):
    """Cache: latents, each beside its rotated key."""

    def __init__(self, config: MlaConfig, hidden_size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.config, self.eps, self.dtype = config, eps, dtype
        c = config
        H, q = c.num_heads, c.num_heads * (c.nope_dim + c.rope.dim)
        parts = {"q": c.q_lora_rank or q, "kv": c.kv_lora_rank + c.rope.dim, "gate": H}
        self.in_proj = Linear(hidden_size, parts, dtype)
        if c.q_lora_rank:
            self.q_norm = Vector(c.q_lora_rank, dtype=dtype)
            self.q_up = Linear(c.q_lora_rank, {"weight": q}, dtype)
        self.kv_norm = Vector(c.kv_lora_rank, dtype=dtype)
        self.kv_up = KvUp(H, c.nope_dim, c.v_dim, c.kv_lora_rank, dtype)
        self.out = Linear(H * c.v_dim, {"weight": hidden_size}, dtype)

    def cache_specs(self) -> list[CacheSpec]:
        return [PagedSpec(1, self.config.kv_lora_rank + self.config.rope.dim, self.dtype)]

    def forward(
        self, stream: Stream, norm: Norm, window: Window, caches: Sequence[Cache], rotation: Rotation | None
    ) -> Stream:
        c = self.config
        assert rotation is not None
        (latents,) = caches
        assert isinstance(latents, torch.Tensor)
        projected, residual = self.in_proj.after(stream, norm)
        q, kv, gate = projected.split(list(self.in_proj.parts.values()), -1)
        if c.q_lora_rank:
            q, _ = self.q_up.after(Stream(q), (self.q_norm.weight, self.eps))
        o = mla(q.reshape(q.shape[0], c.num_heads, -1), kv, gate, (self.kv_norm.weight, self.eps),
                self.kv_up.halves, rotation, c.rope.interleaved, window.pages(latents), window.place,
                c.scale)  # fmt: skip
        return Stream(residual, self.out(o))


class KvUp(Slotted):
    """The up-projection of the latent, kept as (key [H, R, N], value [H, V, R]) and filled from one [H (N + V), R]."""

    def __init__(self, num_heads: int, nope_dim: int, v_dim: int, rank: int, dtype: torch.dtype):
        super().__init__()
        self.shape = (num_heads, nope_dim + v_dim, rank)
        self.nope_dim = nope_dim
        self.weight = torch.nn.Parameter(torch.empty(self.shape, dtype=dtype), requires_grad=False)
        self._key: torch.Tensor | None = None

    def slots(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight.view(-1, self.shape[2])}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.shape[0] * self.shape[1], self.shape[2])}

    def prepare(self) -> None:
        """Transpose the key half once. Call after loading."""
        self._key = self.weight[:, : self.nope_dim].transpose(1, 2).contiguous()

    @property
    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._key is not None, "prepare() was not called"
        return self._key, self.weight[:, self.nope_dim :]


class KdaLayer(torch.nn.Module):
    """Cache: conv history and delta-rule matrices."""

    def __init__(self, config: KdaConfig, hidden_size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.config, self.eps, self.dtype = config, eps, dtype
        H, D = config.num_heads, config.head_dim
        A = H * D
        self.in_proj = Linear(hidden_size, {"q": A, "k": A, "v": A, "f": A, "z": A, "b": H}, dtype)
        self.conv = ConvTaps(A, config.conv_width)
        self.a_log = Vector(H, dtype=torch.float32)
        self.dt_bias = Vector(A, dtype=torch.float32)
        self.out_norm = Vector(D, dtype=dtype)
        self.out = Linear(A, {"weight": hidden_size}, dtype)
        self._rate: torch.Tensor | None = None

    def cache_specs(self) -> list[CacheSpec]:
        H, D = self.config.num_heads, self.config.head_dim
        return [RecurrentSpec(3 * H * D, self.config.conv_width, (H, D, D), self.dtype)]

    def forward(
        self, stream: Stream, norm: Norm, window: Window, caches: Sequence[Cache], rotation: Rotation | None
    ) -> Stream:
        c = self.config
        (cache,) = caches
        assert isinstance(cache, Recurrent)
        projected, residual = self.in_proj.after(stream, norm)
        o, gate = kda(projected, self.conv.weight, self.rate, self.dt_bias.weight.view(c.num_heads, c.head_dim),
                      c.lower_bound, cache.history, cache.states, window.place.start, window.live,
                      window.prefill, window.rows)  # fmt: skip
        branch = gated_norm_linear(o, gate, (self.out_norm.weight, self.eps), self.out.operand)
        return Stream(residual, self.out.whole(branch))

    def prepare(self) -> None:
        """exp(A_log) once. Call after loading."""
        self._rate = self.a_log.weight.exp()

    @property
    def rate(self) -> torch.Tensor:
        assert self._rate is not None, "prepare() was not called"
        return self._rate


class ConvTaps(Slotted):
    """Taps of the three depthwise convolutions, [3A, W] fp32: slots q, k, v, each [A, 1, W]."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.channels, self.width = channels, width
        self.weight = torch.nn.Parameter(torch.empty(3 * channels, width), requires_grad=False)

    def slots(self) -> dict[str, torch.Tensor]:
        return dict(zip("qkv", self.weight[:, None].chunk(3), strict=True))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys("qkv", (self.channels, 1, self.width))


def build_mixer(config: Mixer, hidden_size: int, eps: float, dtype: torch.dtype) -> GqaLayer | MlaLayer | KdaLayer:
    """The layer of a mixer configuration, on the default device, unfilled."""
    kinds = {GqaConfig: GqaLayer, MlaConfig: MlaLayer, KdaConfig: KdaLayer}
    return kinds[type(config)](config, hidden_size, eps, dtype)
