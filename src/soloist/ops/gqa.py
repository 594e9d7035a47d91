"""Grouped-query attention of one window: norms of q and k, rope, cache write, attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from soloist.ops.cases import case, randn
from soloist.ops.op import Case, op
from soloist.ops.paged_attention import gather, paged_attention, prefill_attention
from soloist.ops.rms_norm import rms_norm
from soloist.ops.rope import rope


@dataclass(frozen=True)
class Place:
    """Where a window lies: what every positional op of one forward pass shares.

    start [1] first position, on the device; page and offset [T]: where each row is written in a cache
    [pages, G, P, D]; table [n] page ids in context order, or None if the pages given lie in order; start_host is None in
    a round (the host does not know it) and the position in prefill.
    """

    start: torch.Tensor
    page: torch.Tensor
    offset: torch.Tensor
    table: torch.Tensor | None
    start_host: int | None = None


def gqa(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    rotation: tuple[torch.Tensor, torch.Tensor],
    interleaved: bool,
    keys: torch.Tensor,
    values: torch.Tensor,
    place: Place,
    scale: float,
) -> torch.Tensor:
    """Args: qkv [T, H + 2G, D]; norms = (q weight [D], k weight [D], eps) or None; rotation = cos, sin [T, D/2];
        keys, values [pages, G, P, D].
    Writes: keys and values at the window's place.   Returns: [T, H * D].
    """
    q_norm, k_norm, eps = (None, None, 0.0) if norms is None else norms
    if place.start_host is None:
        return gqa_round(qkv, q_norm, k_norm, eps, *rotation, interleaved, keys, values, place.page, place.offset,
                         place.table, place.start, scale)  # fmt: skip
    q = _write(qkv, q_norm, k_norm, eps, *rotation, interleaved, keys, values, place.page, place.offset)
    S = place.start_host + q.shape[0]
    keys, values = gather(keys, place.table, S), gather(values, place.table, S)
    return prefill_attention(q, keys, values, place.start_host, scale).flatten(1)


def _case(T: int, H: int, G: int, D: int, start: int, pages: int, normed: bool, interleaved: bool, ordered: bool) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        table = torch.randperm(pages, generator=g)
        positions = start + torch.arange(T)
        page = positions // 32
        angles = randn(g, T, D // 2, scale=50)
        return {"qkv": randn(g, T, H + 2 * G, D), "q_norm": randn(g, D) if normed else None,
                "k_norm": randn(g, D) if normed else None, "eps": 1e-6, "cos": angles.cos(), "sin": angles.sin(),
                "interleaved": interleaved, "keys": randn(g, pages, G, 32, D), "values": randn(g, pages, G, 32, D),
                "page": page if ordered else table[page], "offset": positions % 32, "table": None if ordered else table,
                "start": torch.tensor([start]), "scale": D**-0.5}  # fmt: skip

    return case(draw, f"T{T}-H{H}-G{G}-D{D}-start{start}{'-normed' if normed else ''}")


@op(cases=[_case(1, 4, 2, 32, 0, 1, True, False, True), _case(3, 6, 2, 34, 62, 3, False, True, False),
           _case(16, 9, 3, 64, 250, 9, True, False, False), _case(2, 8, 1, 128, 70, 3, True, False, True)],
    rtol=1e-4, atol=1e-4)  # fmt: skip
def gqa_round(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    keys: torch.Tensor,
    values: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
    table: torch.Tensor | None,
    start: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`gqa` where the host does not know the place; arguments and place unpacked.

    Writes: keys and values at (page, offset) [T], the pages of start .. start + T - 1.   Returns: [T, H * D].
    """
    q = _write(qkv, q_norm, k_norm, eps, cos, sin, interleaved, keys, values, page, offset)
    return paged_attention(q, keys, values, table, start, scale).flatten(1)


def _write(
    qkv: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    keys: torch.Tensor,
    values: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
) -> torch.Tensor:
    """Write the window's keys and values, normed and turned; return q, the same: [T, H, D]."""
    G = keys.shape[1]
    H = qkv.shape[1] - 2 * G
    qk, v = qkv.split((H + G, G), 1)
    if q_norm is not None and k_norm is not None:
        qk = torch.cat((rms_norm(qk[:, :H], q_norm, eps), rms_norm(qk[:, H:], k_norm, eps)), 1)
    q, k = rope(qk, cos, sin, interleaved).split((H, G), 1)
    keys[page, :, offset] = k
    values[page, :, offset] = v
    return q
