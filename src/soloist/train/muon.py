"""Muon for matrices and Adam for the rest, in one optimiser, with equal shapes stacked into batched products.

Muon: momentum, then five Newton-Schulz steps that bring all singular values near one; the step is scaled by
0.2 * sqrt(larger side) so that one learning rate serves both rules. Sources: K. Jordan's Muon; "Muon is scalable for
LLM training".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonal(g: Tensor, steps: int = 5) -> Tensor:
    """Bring the singular values of each matrix of g [N, R, C] near one. fp32 in, g's dtype out; bf16 products on a
    GPU."""
    a, b, c = _NEWTON_SCHULZ
    x = g.bfloat16() if g.is_cuda else g
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(g.dtype)


class MuonAdam(torch.optim.Optimizer):
    """Two rules, chosen per parameter group by `rule` ("muon" or "adam").

    State per parameter: `momentum`, and for adam also `square`. Resumable through `state_dict`.
    """

    def __init__(self, groups: Iterable[dict], lr: float) -> None:
        defaults = {
            "lr": lr,
            "rule": "adam",
            "weight_decay": 0.0,
            "betas": (0.9, 0.95),
            "eps": 1e-10,
            "momentum": 0.95,
            "steps": 0,
        }
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            group["steps"] += 1
            parameters: list[Tensor] = [p for p in group["params"] if p.grad is not None]
            (self._muon if group["rule"] == "muon" else self._adam)(group, parameters)

    def _muon(self, group: dict, parameters: list[Tensor]) -> None:
        same: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for p in parameters:
            same[tuple(p.shape[-2:])].append(p)
        for shape, members in same.items():
            for p in members:
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p, dtype=torch.float32)
            grads = [p.grad.float() for p in members]  # type: ignore[union-attr]
            momenta = [self.state[p]["momentum"] for p in members]
            torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
            # Nesterov: look one step ahead along the momentum
            ahead = torch._foreach_lerp(grads, momenta, group["momentum"])
            stacked = torch.cat([x.reshape(-1, *shape) for x in ahead])
            update = orthogonal(stacked) * (0.2 * max(shape) ** 0.5)
            pieces = update.split([p.numel() // (shape[0] * shape[1]) for p in members])
            torch._foreach_mul_(members, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(members, [u.view_as(p) for u, p in zip(pieces, members, strict=True)], alpha=-group["lr"])

    def _adam(self, group: dict, parameters: list[Tensor]) -> None:
        if not parameters:
            return
        for p in parameters:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p, dtype=torch.float32)
                self.state[p]["square"] = torch.zeros_like(p, dtype=torch.float32)
        beta1, beta2 = group["betas"]
        grads = [p.grad.float() for p in parameters]  # type: ignore[union-attr]
        momenta = [self.state[p]["momentum"] for p in parameters]
        squares = [self.state[p]["square"] for p in parameters]
        torch._foreach_lerp_(momenta, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        scale = torch._foreach_div(squares, 1 - beta2 ** group["steps"])
        torch._foreach_sqrt_(scale)
        torch._foreach_add_(scale, group["eps"])
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_addcdiv_(parameters, momenta, scale, value=-group["lr"] / (1 - beta1 ** group["steps"]))


def optimiser_for(model: nn.Module, lr: float, weight_decay: float) -> MuonAdam:
    """Muon for matrices inside the layers, Adam for embeddings, heads, router, norms, taps and gates."""
    matrices: list[Tensor] = []
    rest: list[Tensor] = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        plain = p.ndim >= 2 and min(p.shape[-2:]) >= 16
        outside = any(part in name for part in ("word_embeddings", "lm_head", "markov", "gate.weight", "conv1d", "confidence"))
        (matrices if plain and not outside else rest).append(p)
    return MuonAdam([{"params": matrices, "rule": "muon", "weight_decay": weight_decay}, {"params": rest, "rule": "adam"}], lr)
