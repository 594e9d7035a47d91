"""Grouped-query attention of one window: norms of q and k, rope, cache write, attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, place: Place, scale: float
) -> torch.Tensor:
    """Attention over a cache into which the window has been written: the round's kernel, or prefill's."""
    if place.start_host is None:
        return paged_attention(q, keys, values, place.table, place.start, scale)
    S = place.start_host + q.shape[0]
    keys, values = gather(keys, place.table, S), gather(values, place.table, S)
    return prefill_attention(q, keys, values, place.start_host, scale)


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
    T, G = qkv.shape[0], keys.shape[1]
    H = qkv.shape[1] - 2 * G
    qk, v = qkv.split((H + G, G), 1)
    if norms is not None:
        q_weight, k_weight, eps = norms
        qk = torch.cat((rms_norm(qk[:, :H], q_weight, eps), rms_norm(qk[:, H:], k_weight, eps)), 1)
    q, k = rope(qk, *rotation, interleaved).split((H, G), 1)
    keys[place.page, :, place.offset] = k
    values[place.page, :, place.offset] = v
    return attend(q, keys, values, place, scale).reshape(T, -1)
