"""The gated delta rule over one window, keeping the state after every token."""

from __future__ import annotations

import torch

from soloist.ops.cases import case, randn
from soloist.ops.op import Case, op


def _case(T: int, H: int, Dk: int, Dv: int, live: int) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        unit = torch.nn.functional.normalize
        return {"q": unit(randn(g, T, H, Dk), dim=-1) * Dk**-0.5, "k": unit(randn(g, T, H, Dk), dim=-1),
                "v": randn(g, T, H, Dv), "g": -5 * torch.sigmoid(randn(g, T, H, Dk)),
                "beta": torch.sigmoid(randn(g, T, H)), "states": randn(g, 17, H, Dk, Dv),
                "live": torch.tensor([live])}  # fmt: skip

    return case(draw, f"T{T}-H{H}-Dk{Dk}-Dv{Dv}-live{live}")


@op(cases=[_case(1, 4, 32, 32, 0), _case(4, 3, 33, 17, 2), _case(16, 2, 128, 128, 16)])
def kda_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    live: torch.Tensor,
) -> torch.Tensor:
    """Advance the gated delta rule over one window and keep the state after every token.

    Per token and head: S <- diag(exp g) S;  r = v - S^T k;  S <- S + k (beta r)^T;  o = S^T q.

    Args: q [T, H, Dk] unit length times Dk^-0.5; k [T, H, Dk] unit length; v [T, H, Dv]; g [T, H, Dk] log decay, <= 0;
        beta [T, H] in (0, 1); all fp32; states [slots, H, Dk, Dv] fp32; live [1], on the device, the slot to start from.
    Writes: the T slots after `live`, round the end: slot (live + 1 + j) mod slots is the state after window token j.
    The live slot itself stays.   Returns: o [T, H, Dv] fp32.   Raises: ValueError if T >= slots.
    Source: Kimi Linear paper; naive recurrence of flash-linear-attention.
    """
    slots = _checked_slots(q, states)
    state = states.index_select(0, live)[0]
    decay, write = g.exp()[..., None], beta[..., None]
    out = torch.empty_like(v)
    for j in range(q.shape[0]):
        state = state * decay[j]
        error = (v[j] - torch.bmm(k[j, :, None], state)[:, 0]) * write[j]
        state.add_(k[j, :, :, None] * error[:, None])
        out[j] = torch.bmm(q[j, :, None], state)[:, 0]
        states.index_copy_(0, (live + (1 + j)) % slots, state[None])
    return out


@kda_step.impl("in_place", on="cpu")
def _in_place(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    live: torch.Tensor,
) -> torch.Tensor:
    """Each state is made where it will lie. Reading the live slot costs nothing where the host computes."""
    slots, live_host = _checked_slots(q, states), int(live)
    state = states[live_host]
    decay, write = g.exp()[..., None], beta[..., None]
    out = torch.empty_like(v)
    for j in range(q.shape[0]):
        state = torch.mul(state, decay[j], out=states[(live_host + 1 + j) % slots])
        error = (v[j] - torch.bmm(k[j, :, None], state)[:, 0]) * write[j]
        state.add_(k[j, :, :, None] * error[:, None])
        out[j] = torch.bmm(q[j, :, None], state)[:, 0]
    return out


def _checked_slots(q: torch.Tensor, states: torch.Tensor) -> int:
    T, slots = q.shape[0], states.shape[0]
    if T >= slots:
        raise ValueError(f"a window of {T} tokens needs {T + 1} state slots, there are {slots}")
    return slots
