"""Attention of a window over cached keys and values that lie in pages.

Serves grouped-query attention and, with one key head as wide as latent plus rope, absorbed MLA.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from soloist.ops.cases import case, randn
from soloist.ops.op import Case, op


def in_order(cache: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
    """Pages [n, P, ...] of a cache in context order; `table` None means that they lie in order."""
    return cache if table is None else cache.index_select(0, table)


def _case(T: int, H: int, G: int, D: int, Dv: int, start: int, pages: int) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        keys, values = randn(g, pages, 32, G, D), randn(g, pages, 32, G, Dv)
        table = torch.randperm(pages, generator=g)
        return {"q": randn(g, T, H, D), "keys": keys, "values": values, "table": table,
                "start": torch.tensor([start]), "scale": D**-0.5}  # fmt: skip

    return case(draw, f"T{T}-H{H}-G{G}-D{D}-start{start}")


@op(cases=[_case(1, 4, 2, 32, 32, 0, 1), _case(3, 6, 2, 33, 17, 40, 3), _case(16, 4, 1, 64, 48, 100, 4)])
def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor | None,
    start: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Causal attention: window row j sees the positions 0 .. start + j. The window's own keys are in the cache already.

    The softmax sum and the sum over values run page after page from the first, so that neither pages beyond the
    context nor other rows change a row's bits. Everything cached must be finite, stale rows included.

    Args: q [T, H, Dk]; keys [pages, P, G, Dk]; values [pages, P, G, Dv]; table [n] page ids in context order or None
        if the pages given are the context in order; start [1], on the device.   Returns: [T, H, Dv] in q's dtype.
    """
    T, H, Dk = q.shape
    keys, values = in_order(keys, table), in_order(values, table)
    pages, P, G, Dv = values.shape
    group = H // G
    columns = q.float().view(T, G, group, Dk).permute(1, 3, 0, 2).reshape(G, Dk, T * group)
    if T * group == 1:
        columns = torch.cat((columns, columns), -1)
    scores = torch.bmm(keys.float().reshape(pages * P, G, Dk).transpose(0, 1), columns)  # [G, S, T * group]
    scores = scores.transpose(1, 2).contiguous().mul_(scale)
    last_seen = (start + torch.arange(T, device=q.device)).repeat_interleave(group)
    if T * group == 1:
        last_seen = last_seen.repeat(2)
    hidden = torch.arange(pages * P, device=q.device) > last_seen[:, None]
    scores.masked_fill_(hidden, float("-inf"))
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_().view(G, -1, pages, P)
    total = weights.sum(-1).cumsum(-1)[..., -1:]  # [G, T * group, 1]
    out = torch.stack([_weighted_sum(weights[g], values[:, :, g].float()) for g in range(G)]) / total
    return out[:, : T * group].view(G, T, group, Dv).transpose(0, 1).reshape(T, H, Dv).to(q.dtype)


def _weighted_sum(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Sum of values [pages, P, Dv] under weights [rows, pages, P], page after page: [rows, Dv]."""
    by_page = torch.bmm(weights.transpose(0, 1), values)
    out = by_page[0]
    for page in by_page[1:]:
        out = out + page
    return out


def prefill_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, scale: float
) -> torch.Tensor:
    """The same for a long window whose place the host knows.

    Args: q [T, H, Dk]; keys [S, G, Dk] and values [S, G, Dv] of the positions 0 .. S - 1, S = start + T.
    Returns: [T, H, Dv].
    """
    q, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))
    T, S = q.shape[2], keys.shape[2]
    visible = None
    if start:
        visible = torch.arange(S, device=q.device) <= torch.arange(start, S, device=q.device)[:, None]
    out = F.scaled_dot_product_attention(
        q, keys, values, attn_mask=visible, is_causal=not start and T > 1, scale=scale,
        enable_gqa=q.shape[1] != keys.shape[1],
    )  # fmt: skip
    return out[0].transpose(0, 1)
