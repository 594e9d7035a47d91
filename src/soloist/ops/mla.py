"""Gated multi-head latent attention of one window: latent norm, rope, cache write, attention, head gate.

In a round the up-projections are absorbed into query and output, so the cache holds one latent and one rotated key a
position and is read once for all heads. In prefill keys and values are expanded, which costs less arithmetic.
Source: DeepSeek-V2 (absorption), Ling-3.0 (head-wise output gate).
"""

from __future__ import annotations

import torch

from soloist.ops.cases import case, randn
from soloist.ops.elementwise import sigmoid
from soloist.ops.gqa import Place
from soloist.ops.linear import grouped_linear
from soloist.ops.op import Case, op
from soloist.ops.paged_attention import gather, paged_attention, prefill_attention
from soloist.ops.rms_norm import rms_norm
from soloist.ops.rope import rope


def mla(
    q: torch.Tensor,
    kv: torch.Tensor,
    gate: torch.Tensor,
    kv_norm: tuple[torch.Tensor, float],
    up: tuple[torch.Tensor, torch.Tensor],
    rotation: tuple[torch.Tensor, torch.Tensor],
    interleaved: bool,
    latents: torch.Tensor,
    place: Place,
    scale: float,
) -> torch.Tensor:
    """Args: q [T, H, N + Dr]; kv [T, R + Dr]; gate [T, H] before its sigmoid; kv_norm = (weight [R], eps);
        up = (key [H, R, N], value [H, Dv, R]); rotation = cos, sin [T, Dr/2]; latents [pages, 1, P, R + Dr].
    Writes: latents at the window's place.   Returns: [T, H * Dv].
    """
    if place.start_host is None:
        return mla_round(q, kv, gate, *kv_norm, *up, *rotation, interleaved, latents, place.page, place.offset,
                         place.table, place.start, scale)  # fmt: skip
    return mla_prefill(q, kv, gate, *kv_norm, *up, *rotation, interleaved, latents, place.page, place.offset, place.table,
                       place.start_host, scale)  # fmt: skip


def _case(T: int, sizes: tuple[int, int, int, int, int], start: int, pages: int, interleaved: bool, ordered: bool) -> Case:
    H, N, Dr, R, Dv = sizes

    def draw(g: torch.Generator) -> dict[str, object]:
        table = torch.randperm(pages, generator=g)
        positions = start + torch.arange(T)
        page = positions // 32
        angles = randn(g, T, Dr // 2, scale=50)
        return {"q": randn(g, T, H, N + Dr), "kv": randn(g, T, R + Dr), "gate": randn(g, T, H),
                "norm_weight": randn(g, R), "eps": 1e-6, "up_key": randn(g, H, R, N, scale=N**-0.5),
                "up_value": randn(g, H, Dv, R, scale=R**-0.5), "cos": angles.cos(), "sin": angles.sin(),
                "interleaved": interleaved, "latents": randn(g, pages, 1, 32, R + Dr),
                "page": page if ordered else table[page], "offset": positions % 32, "table": None if ordered else table,
                "start": torch.tensor([start]), "scale": (N + Dr) ** -0.5}  # fmt: skip

    return case(draw, f"T{T}-H{H}-N{N}-Dr{Dr}-R{R}-Dv{Dv}-start{start}")


@op(cases=[_case(1, (4, 16, 8, 32, 16), 0, 1, True, True), _case(3, (6, 24, 10, 40, 18), 62, 3, False, False),
           _case(16, (4, 33, 16, 100, 33), 250, 9, True, False), _case(2, (16, 128, 64, 512, 128), 70, 3, True, True)],
    rtol=1e-4, atol=1e-4)  # fmt: skip
def mla_round(
    q: torch.Tensor,
    kv: torch.Tensor,
    gate: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    up_key: torch.Tensor,
    up_value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    latents: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
    table: torch.Tensor | None,
    start: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`mla` where the host does not know the place; arguments and place unpacked.

    Writes: latents at (page, offset) [T].   Returns: [T, H * Dv].
    """
    N, R = up_key.shape[2], up_key.shape[1]
    q = _write(q, kv, norm_weight, eps, N, cos, sin, interleaved, latents, page, offset)
    absorbed = torch.cat((grouped_linear(q[..., :N], up_key), q[..., N:]), -1)  # [T, H, R + Dr]
    context = paged_attention(absorbed, latents, latents[..., :R], table, start, scale)
    return _gated(grouped_linear(context, up_value), gate)


def _long_case(T: int, sizes: tuple[int, int, int, int, int], start: int, interleaved: bool) -> Case:
    pages = -(-(start + T) // 32)

    def draw(g: torch.Generator) -> dict[str, object]:
        return _case(T, sizes, start, pages, interleaved, True)(g) | {"start": start}

    return case(draw, f"T{T}-start{start}-{'pairs' if interleaved else 'halves'}")


@op(cases=[_long_case(70, (4, 16, 8, 32, 16), 0, True), _long_case(33, (3, 24, 10, 40, 18), 90, False),
           _long_case(1, (2, 16, 32, 32, 32), 64, True)], rtol=1e-4, atol=1e-4)  # fmt: skip
def mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    gate: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    up_key: torch.Tensor,
    up_value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    latents: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
    table: torch.Tensor | None,
    start: int,
    scale: float,
) -> torch.Tensor:
    """`mla` of a long window that begins at position `start`, which the host knows; arguments and place unpacked.

    Keys and values of every head are made from the cached latents of the whole context.

    Writes: latents at (page, offset) [T].   Returns: [T, H * Dv].
    """
    N, R = up_key.shape[2], up_key.shape[1]
    q = _write(q, kv, norm_weight, eps, N, cos, sin, interleaved, latents, page, offset)
    context = gather(latents, table, start + q.shape[0])[0]
    keys = torch.einsum("sr,hrn->hsn", context[:, :R], up_key)
    shared = context[None, :, R:].expand(keys.shape[0], -1, -1)
    values = torch.einsum("sr,hvr->hsv", context[:, :R], up_value)
    return _gated(prefill_attention(q, torch.cat((keys, shared), -1), values, start, scale), gate)


def _write(
    q: torch.Tensor,
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    N: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    latents: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
) -> torch.Tensor:
    """Write the window's latents and turned keys; return q with its last channels turned."""
    R = norm_weight.shape[0]
    key_rope = rope(kv[:, None, R:], cos, sin, interleaved)[:, 0]
    latents[page, 0, offset] = torch.cat((rms_norm(kv[:, :R], norm_weight, eps), key_rope), -1)
    return torch.cat((q[..., :N], rope(q[..., N:], cos, sin, interleaved)), -1)


def _gated(out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """out [T, H, Dv] times the sigmoid of its head's gate [T, H], which is rounded first: [T, H * Dv]."""
    gated = out.float() * sigmoid(gate.float()).to(out.dtype).float()[..., None]
    return gated.to(out.dtype).flatten(1)
