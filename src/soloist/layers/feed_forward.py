"""Feed-forwards: gated MLP, and routed experts with a shared one."""

from __future__ import annotations

import torch

from soloist.config import MlpConfig, MoeConfig
from soloist.dist.share import Share, whole
from soloist.layers.linear import Linear, Slotted, Vector, parameter
from soloist.ops.linear import linear
from soloist.ops.moe_experts import moe_experts
from soloist.ops.route import route
from soloist.ops.swiglu import swiglu


class Mlp(torch.nn.Module):
    """down(SiLU(gate x) * up x). Of a shared width a rank computes a summand; `forward` returns the sum."""

    def __init__(self, config: MlpConfig, hidden_size: int, dtype: torch.dtype):
        super().__init__()
        self.limit = config.limit
        self.gate_up = Linear(hidden_size, {"gate": config.width, "up": config.width}, dtype, bias=config.bias)
        self.down = Linear(config.width, {"weight": hidden_size}, dtype, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(swiglu(self.gate_up(x), self.limit))

    def summand(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank has to add; without the bias of `down`, which no shared expert has."""
        return linear(swiglu(self.gate_up(x), self.limit), self.down.operand)


class Experts(Slotted):
    """Stacked experts: gate_up [E, 2F, D] and down [E, D, F]; slots gate.<e>, up.<e>, down.<e>, numbered as stored."""

    def __init__(self, num_experts: int, width: int, hidden_size: int, dtype: torch.dtype):
        super().__init__()
        self.num_experts, self.width, self.hidden_size = num_experts, width, hidden_size
        self.gate_up = parameter(num_experts, 2 * width, hidden_size, dtype=dtype)
        self.down = parameter(num_experts, hidden_size, width, dtype=dtype)

    def slots(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for e, (both, down) in enumerate(zip(self.gate_up, self.down, strict=True), self.first):
            found[f"gate.{e}"], found[f"up.{e}"] = both.chunk(2)
            found[f"down.{e}"] = down
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        up, down = (self.width, self.hidden_size), (self.hidden_size, self.width)
        kinds = {"gate": up, "up": up, "down": down}
        return {f"{kind}.{e}": shape for e in range(whole(self.num_experts)) for kind, shape in kinds.items()}

    @property
    def first(self) -> int:
        """Number of the first expert that is here."""
        return self.num_experts.start if isinstance(self.num_experts, Share) else 0

    def held(self, weights: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and numbers [T, A] of the chosen experts as they are stacked here; one of another rank weighs 0."""
        if not isinstance(self.num_experts, Share):
            return weights, experts
        places = experts - self.first
        here = (places >= 0) & (places < int(self.num_experts))
        return weights.where(here, 0.0), places.clamp(0, int(self.num_experts) - 1)


class Moe(torch.nn.Module):
    """Router in fp32, routed experts, and the shared expert where there is one."""

    def __init__(self, config: MoeConfig, hidden_size: int, dtype: torch.dtype):
        super().__init__()
        self.config = config
        num_experts = whole(config.num_experts)
        self.router = Vector(num_experts, hidden_size, dtype=torch.float32)
        if config.selection_bias:
            self.selection_bias = Vector(num_experts, dtype=torch.float32)
        self.experts = Experts(config.num_experts, config.width, hidden_size, dtype)
        if config.shared is not None:
            self.shared = Mlp(config.shared, hidden_size, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c = self.config
        logits = linear(x.float(), self.router.weight)
        bias = self.selection_bias.weight if c.selection_bias else None
        weights, experts = route(
            logits, bias, c.top_k, c.num_groups, c.top_groups, c.score, c.normalise, c.scaling
        )
        weights, experts = self.experts.held(weights, experts)
        out = moe_experts(x, weights, experts, self.experts.gate_up, self.experts.down, c.limit)
        return self._whole(out if c.shared is None else out + self.shared.summand(x))

    def _whole(self, summand: torch.Tensor) -> torch.Tensor:
        """One sum over the ranks for routed experts and shared one together."""
        for size in (self.config.width, self.config.num_experts):
            if isinstance(size, Share):
                return size.group.all_reduce(summand)
        return summand


def build_feed_forward(config: MlpConfig | MoeConfig, hidden_size: int, dtype: torch.dtype) -> Mlp | Moe:
    """The layer of a feed-forward configuration, on the default device, unfilled."""
    if isinstance(config, MoeConfig):
        return Moe(config, hidden_size, dtype)
    return Mlp(config, hidden_size, dtype)
