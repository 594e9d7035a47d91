"""Gated multi-head latent attention of one window: latent norm, rope, cache write, attention, head gate.

In a round the up-projections are absorbed into query and output, so the cache holds one latent and one rotated key a
position and is read once for all heads. In prefill keys and values are expanded, which costs less arithmetic.
Source: DeepSeek-V2 (absorption), Ling-3.0 (head-wise output gate).
"""

from __future__ import annotations

import torch

from soloist.ops.elementwise import sigmoid
from soloist.ops.gqa import Place
from soloist.ops.linear import grouped_linear
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
    T = q.shape[0]
    up_key, up_value = up
    R, N = up_key.shape[1:]
    weight, eps = kv_norm
    key_rope = rope(kv[:, None, R:], *rotation, interleaved)[:, 0]
    entry = torch.cat((rms_norm(kv[:, :R], weight, eps), key_rope), -1)
    latents[place.page, 0, place.offset] = entry
    q_rope = rope(q[..., N:], *rotation, interleaved)
    if place.start_host is None:
        q_latent = grouped_linear(q[..., :N], up_key)  # [T, H, R]
        q_all = torch.cat((q_latent, q_rope), -1)
        context = paged_attention(q_all, latents, latents[..., :R], place.table, place.start, scale)
        out = grouped_linear(context, up_value)  # [T, H, Dv]
    else:
        out = _expanded(torch.cat((q[..., :N], q_rope), -1), latents, up, place, scale)
    gated = out.float() * sigmoid(gate.float()).to(out.dtype).float()[..., None]
    return gated.to(out.dtype).reshape(T, -1)


def _expanded(
    q: torch.Tensor, latents: torch.Tensor, up: tuple[torch.Tensor, torch.Tensor], place: Place, scale: float
) -> torch.Tensor:
    """Prefill: keys and values of every head, made from the cached latents of the whole context: [T, H, Dv]."""
    assert place.start_host is not None
    up_key, up_value = up
    R = up_key.shape[1]
    context = gather(latents, place.table, place.start_host + q.shape[0])[0]
    keys = torch.einsum("sr,hrn->hsn", context[:, :R], up_key)
    shared = context[None, :, R:].expand(keys.shape[0], -1, -1)
    values = torch.einsum("sr,hvr->hsv", context[:, :R], up_value)
    return prefill_attention(q, torch.cat((keys, shared), -1), values, place.start_host, scale)
