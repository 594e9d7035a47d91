"""Grouped-query attention of one window: norms of q and k, rope, cache write, attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from soloist.ops.paged_attention import in_order, paged_attention, prefill_attention
from soloist.ops.rms_norm import rms_norm
from soloist.ops.rope import rope


@dataclass(frozen=True)
class Place:
    """Where a window lies: what every positional op of one forward pass shares.

    start [1] first position, on the device; slots [T] rows to write in a cache flattened to [pages * P, ...];
    table [n] page ids in context order, or None if the pages given lie in order; start_host is None in a round
    (the host does not know it) and the position in prefill.
    """

    start: torch.Tensor
    slots: torch.Tensor
    table: torch.Tensor | None
    start_host: int | None = None


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, place: Place, scale: float
) -> torch.Tensor:
    """Attention over a cache into which the window has been written: the round's kernel, or prefill's."""
    if place.start_host is None:
        return paged_attention(q, keys, values, place.table, place.start, scale)
    S = place.start_host + q.shape[0]
    keys, values = (in_order(c, place.table).flatten(0, 1)[:S] for c in (keys, values))
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
        keys, values [pages, P, G, D].
    Writes: keys and values at place.slots.   Returns: [T, H * D].
    """
    T, G, D = qkv.shape[0], keys.shape[2], keys.shape[3]
    q, k, v = qkv.split((qkv.shape[1] - 2 * G, G, G), 1)
    if norms is not None:
        q_weight, k_weight, eps = norms
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    q, k = rope(q, *rotation, interleaved), rope(k, *rotation, interleaved)
    keys.view(-1, G, D).index_copy_(0, place.slots, k)
    values.view(-1, G, D).index_copy_(0, place.slots, v)
    return attend(q, keys, values, place, scale).reshape(T, -1)
