"""Attention of a window over cached keys and values that lie in pages.

Serves grouped-query attention and, with one key head as wide as latent plus rope, absorbed MLA.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from soloist.ops.cases import case, randn
from soloist.ops.op import Case, op
from soloist.ops.row_product import row_product


def in_order(cache: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
    """Pages [n, G, P, ...] of a cache in context order; `table` None means that they lie in order."""
    return cache if table is None else cache.index_select(0, table)


def _case(T: int, H: int, G: int, D: int, Dv: int, start: int, pages: int) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        keys, values = randn(g, pages, G, 32, D), randn(g, pages, G, 32, Dv)
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

    Args: q [T, H, Dk]; keys [pages, G, P, Dk]; values [pages, G, P, Dv]; table [n] page ids in context order or None
        if the pages given are the context in order; start [1], on the device.   Returns: [T, H, Dv] in q's dtype.
    """
    keys, values = in_order(keys, table), in_order(values, table)
    pages, G, P, _ = keys.shape
    group = q.shape[1] // G
    last_seen = start + torch.arange(q.shape[0] * group, device=q.device) // group
    unseen = torch.arange(pages * P, device=q.device) > last_seen[:, None]  # [T * group, S]
    return weigh_pages(q, keys, values, unseen, scale)


def weigh_pages(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, unseen: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention over pages in context order, summed page after page.

    Args: q [T, H, Dk]; keys [pages, G, P, Dk]; values [pages, G, P, Dv]; unseen [T * (H / G), pages * P] bool, the rows
        of one window row side by side.
    Returns: [T, H, Dv] in q's dtype.
    """
    T, H, Dk = q.shape
    pages, G, P, Dv = values.shape
    m = T * (H // G)
    rows = q.float().view(T, G, H // G, Dk).transpose(0, 1).reshape(1, G, m, Dk)
    rows = rows.expand(pages, G, m, Dk).reshape(-1, m, Dk)
    scores = row_product(rows, keys.float().reshape(-1, P, Dk)).view(pages, G, m, P)
    scores = scores.permute(1, 2, 0, 3).reshape(G, m, pages * P).mul_(scale)
    scores.masked_fill_(unseen, float("-inf"))
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_().view(G, m, pages, P)
    total = weights.sum(-1).cumsum(-1)[..., -1:]  # [G, m, 1]
    weights = weights.permute(2, 0, 1, 3).reshape(-1, m, P)
    by_page = row_product(weights, values.float().reshape(-1, P, Dv).transpose(1, 2)).view(pages, G, m, Dv)
    out, *others = by_page.unbind()
    for page in others:
        out = out + page
    out = (out / total).view(G, T, H // G, Dv)
    return out.transpose(0, 1).reshape(T, H, Dv).to(q.dtype)


def gather(cache: torch.Tensor, table: torch.Tensor | None, S: int) -> torch.Tensor:
    """The first S positions of a cache [pages, G, P, D] as [G, S, D]."""
    ordered = in_order(cache, table)
    return ordered.transpose(0, 1).flatten(1, 2)[:, :S]


PREFILL_ROWS = 64
"""Rows of a prefill that are computed together on a CPU, from a multiple of this position on."""


def prefill_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, scale: float
) -> torch.Tensor:
    """The same for a long window whose place the host knows.

    On a CPU it runs in blocks that begin at multiples of PREFILL_ROWS and see no key beyond their own: the library
    chooses its own blocks, and so the order of its sums, by the number of rows, and a window that is cut at such a
    multiple would otherwise get other bits than a whole one.

    Args: q [T, H, Dk]; keys [G, S, Dk] and values [G, S, Dv] of the positions 0 .. S - 1, S = start + T.
    Returns: [T, H, Dv].
    """
    if q.device.type != "cpu":
        return fused_attention(q, keys, values, scale)
    S = start + q.shape[0]
    starts = [start, *range(start - start % PREFILL_ROWS + PREFILL_ROWS, S, PREFILL_ROWS)]
    blocks = [
        _attention(q[first - start : end - start], keys[:, :end], values[:, :end], first, scale)
        for first, end in zip(starts, [*starts[1:], S], strict=True)
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def fused_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """`prefill_attention` in the form that the library's fused kernels take: one width, one head of keys a head of queries.

    A mask of numbers would send a later chunk to the kernel that stores all scores; the lower-right bias is a flag.
    """
    # Only here, since it brings in torch's compiler, which takes longer than all else at the start of a process.
    from torch.nn.attention.bias import causal_lower_right

    (T, H, Dk), (G, S, Dv) = q.shape, values.shape
    values = F.pad(values, (0, Dk - Dv))
    if G != H:
        keys, values = keys.repeat_interleave(H // G, 0), values.repeat_interleave(H // G, 0)
    visible = causal_lower_right(T, S) if T > 1 else None
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys[None], values[None], attn_mask=visible, scale=scale)
    return out[0, :, :, :Dv].transpose(0, 1)


def _attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, scale: float
) -> torch.Tensor:
    q, keys, values = q.transpose(0, 1)[None], keys[None], values[None]
    T, S = q.shape[2], keys.shape[2]
    visible = None
    if start:
        visible = torch.arange(S, device=q.device) <= torch.arange(start, S, device=q.device)[:, None]
    out = F.scaled_dot_product_attention(
        q, keys, values, attn_mask=visible, is_causal=not start and T > 1, scale=scale,
        enable_gqa=q.shape[1] != keys.shape[1],
    )  # fmt: skip
    return out[0].transpose(0, 1)
