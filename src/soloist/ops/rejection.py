"""Standard speculative sampling, written as a pick: a draft that is accepted is picked again.

Acceptance by equality then applies unchanged. The text has the target's distribution, but which text it is depends on
the drafter and the width, unlike with noise keyed to the position. Source: Leviathan et al. (arXiv 2211.17192).
"""

from __future__ import annotations

import torch

from soloist.ops.cases import case, randn
from soloist.ops.noise import gumbel
from soloist.ops.op import Case, op

COIN, FRESH = 0x5EED_C014, 0x5EED_F4E5
"""Mixed into the seed: coins and fresh draws share no noise with each other or with a drafter."""


def _case(T: int, V: int, certain: bool) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        law = torch.softmax(randn(g, T + 1, V), -1)
        return {"logits": randn(g, T, V), "window": torch.randint(V, (T,), generator=g),
                "law": None if certain else law, "places": torch.arange(9, 9 + T),
                "seed": torch.tensor([3])}  # fmt: skip

    return case(draw, f"T{T}-V{V}-{'certain' if certain else 'law'}")


@op(cases=[_case(1, 101, True), _case(5, 33, True), _case(16, 101, False)])
def pick_or_reject(
    logits: torch.Tensor, window: torch.Tensor, law: torch.Tensor | None, places: torch.Tensor, seed: torch.Tensor
) -> torch.Tensor:
    """Row j picks its draft x = window[j + 1] with probability min(1, p(x) / q(x)), otherwise a token of the
    distribution max(p - q, 0) made whole, which never is x. The last row has no draft and picks from p.

    Args: logits [T, V] fp32, processed: p is their softmax; window [T]; law [>= T - 1, V] fp32, the rows q that the
        drafts were drawn from, None for drafts that were certain (q is 1 at the draft); places [T] that the picks will
        take; seed [1].   Returns: [T] int64. Picks behind the first that is not its draft mean nothing.
    """
    p = torch.softmax(logits, -1)
    drafts = window[1:, None]
    own = p[:-1].gather(1, drafts)
    if law is None:
        proposed = torch.ones_like(own)
        rest = p[:-1].scatter(1, drafts, 0.0)
    else:
        law = law[: drafts.shape[0]]
        proposed = law.gather(1, drafts)
        rest = (p[:-1] - law).clamp_min(0)
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p[:-1])  # p = q up to rounding
    # The uniform number behind a Gumbel value; below 1, so that p = q is always accepted.
    coin = -torch.expm1(-torch.exp(-gumbel(places[:-1], seed ^ COIN, 1))).clamp_min(2.0**-24 - 1)
    fresh = (torch.cat((rest, p[-1:])).log() + gumbel(places, seed ^ FRESH, p.shape[1])).argmax(-1)
    return torch.cat((torch.where(coin * proposed < own, drafts, fresh[:-1, None])[:, 0], fresh[-1:]))
