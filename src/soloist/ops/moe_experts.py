"""The routed experts of a window."""

from __future__ import annotations

import torch

from soloist.ops.cases import case, randn
from soloist.ops.op import Case, op
from soloist.ops.row_product import row_product
from soloist.ops.swiglu import swiglu


def _case(T: int, E: int, top_k: int, D: int, width: int) -> Case:
    def draw(g: torch.Generator) -> dict[str, object]:
        experts = torch.stack([torch.randperm(E, generator=g)[:top_k] for _ in range(T)])
        weights = torch.rand(T, top_k, generator=g)
        return {"x": randn(g, T, D), "weights": weights, "experts": experts, "limit": 0.7,
                "gate_up": randn(g, E, 2 * width, D, scale=D**-0.5), "down": randn(g, E, D, width)}  # fmt: skip

    return case(draw, f"T{T}-E{E}-top{top_k}-D{D}-F{width}")


@op(cases=[_case(1, 16, 4, 64, 24), _case(5, 8, 3, 33, 17), _case(16, 32, 4, 96, 64)],
    rtol=1e-4, atol=1e-4, rows="x weights experts")  # fmt: skip
def moe_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    limit: float = 0.0,
) -> torch.Tensor:
    """Weighted sum of each token's experts; the sum in fp32 over ascending expert numbers, rounded once.

    Args: x [T, D]; weights [T, A] fp32; experts [T, A]; gate_up [E, 2F, D]; down [E, D, F]; limit as in `swiglu`.
    Returns: [T, D] in x's dtype.
    """
    experts, order = experts.sort(-1)
    weights = weights.gather(1, order)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for slot in range(experts.shape[1]):
        chosen = experts[:, slot]
        gate = row_product(x[:, None], gate_up.index_select(0, chosen))[:, 0]
        y = row_product(swiglu.reference(gate, limit)[:, None], down.index_select(0, chosen))[:, 0]
        out = out + y.float() * weights[:, slot, None]
    return out.to(x.dtype)


@moe_experts.impl("by_expert", on="cpu")
def _by_expert(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    limit: float = 0.0,
) -> torch.Tensor:
    """Read every expert that occurs once, for all its rows. Reading the choice costs nothing where the host computes."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    rows_of: dict[int, list[int]] = {}
    slots_of: dict[int, list[int]] = {}
    for row, chosen in enumerate(experts.tolist()):
        for slot, expert in enumerate(chosen):
            rows_of.setdefault(expert, []).append(row)
            slots_of.setdefault(expert, []).append(slot)
    for expert in sorted(rows_of):
        rows = torch.tensor(rows_of[expert])
        hidden = swiglu(row_product(x.index_select(0, rows), gate_up[expert]), limit)
        y = row_product(hidden, down[expert]).float()
        out.index_add_(0, rows, y * weights[rows, slots_of[expert], None])
    return out.to(x.dtype)

