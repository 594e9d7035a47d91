"""The gated activation of a feed-forward, with the clamps that Ling-3.0 was trained with."""

from __future__ import annotations

import torch

from soloist.ops.cases import case, randn
from soloist.ops.elementwise import silu
from soloist.ops.op import Case, op


def _case(T: int, width: int, limit: float) -> Case:
    return case(lambda g: {"gate_up": randn(g, T, 2 * width, scale=3), "limit": limit}, f"T{T}-F{width}-limit{limit}")


@op(cases=[_case(1, 24, 0.0), _case(4, 96, 0.5), _case(16, 1536, 0.0)], rows="gate_up")
def swiglu(gate_up: torch.Tensor, limit: float = 0.0) -> torch.Tensor:
    """SiLU(gate) * up, computed in fp32 and rounded once.

    A limit > 0 acts after SiLU: SiLU(gate) <= limit and -limit <= up <= limit.

    Args: gate_up [..., 2F], the gate in the first half.   Returns: [..., F] in gate_up's dtype.
    Source: Ling-3.0 serving code; the clamp law is that of Step-3.7.
    """
    gate, up = gate_up.float().chunk(2, -1)
    gate = silu(gate)
    if limit > 0.0:
        gate = gate.clamp_max(limit)
        up = up.clamp(-limit, limit)
    return (gate * up).to(gate_up.dtype)
