"""Attention of a drafted block: over the cached context behind it, and over the block itself in both directions."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from soloist.ops.cases import case, randn
from soloist.ops.op import Case, op
from soloist.ops.paged_attention import in_order, weigh_pages


def _case(B: int, H: int, G: int, D: int, start: int, pages: int, reach: int, causal: bool) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        return {"q": randn(g, B, H, D), "own_keys": randn(g, B, G, D), "own_values": randn(g, B, G, D),
                "keys": randn(g, pages, G, 32, D), "values": randn(g, pages, G, 32, D),
                "table": torch.randperm(pages, generator=g), "start": torch.tensor([start]), "scale": D**-0.5,
                "reach": reach, "causal": causal}  # fmt: skip

    return case(draw, f"B{B}-H{H}-G{G}-D{D}-start{start}-reach{reach}{'-causal' if causal else ''}")


@op(cases=[_case(1, 4, 2, 32, 0, 1, 0, False), _case(7, 6, 2, 33, 40, 3, 0, False), _case(16, 4, 4, 64, 96, 3, 9, False),
           _case(5, 4, 1, 16, 50, 2, 20, True)])  # fmt: skip
def block_attention(
    q: torch.Tensor,
    own_keys: torch.Tensor,
    own_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor | None,
    start: torch.Tensor,
    scale: float,
    reach: int = 0,
    causal: bool = False,
) -> torch.Tensor:
    """Slot k, at place start + k, sees the context's places below start and all slots of its block.

    Args: q [B, H, D]; own_keys, own_values [B, G, D], B <= P; keys, values [pages, G, P, D]; table as in
        paged_attention; start [1]; reach: places a slot looks back, itself included, 0 for all; causal: slots see no
        later slots.
    Returns: [B, H, D] in q's dtype.   Source: DFlash (arXiv 2602.06036).
    """
    keys, values = in_order(keys, table), in_order(values, table)
    pages, G, P, _ = keys.shape
    B, H, _ = q.shape
    own = [F.pad(t.transpose(0, 1), (0, 0, 0, P - B))[None] for t in (own_keys, own_values)]
    keys, values = torch.cat((keys, own[0])), torch.cat((values, own[1]))
    slot = torch.arange(B * (H // G), device=q.device)[:, None] // (H // G)
    past, block = torch.arange(pages * P, device=q.device), torch.arange(P, device=q.device)
    behind = torch.cat(((start + slot) - past, slot - block), -1)  # how far each key lies behind the slot
    unseen = torch.cat((past >= start, block >= B)).expand_as(behind)
    if reach:
        unseen = unseen | (behind >= reach)
    if causal:
        unseen = unseen | (behind < 0)
    return weigh_pages(q, keys, values, unseen, scale)
