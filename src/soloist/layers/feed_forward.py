"""Feed-forwards: gated MLP, and routed experts with a shared one."""

from __future__ import annotations

import torch

from soloist.config import MlpConfig, MoeConfig
from soloist.dist.share import Share, whole
from soloist.layers.linear import Linear, Slotted, Stream, Vector, parameter
from soloist.ops.moe import RoutedExperts, Routing, SharedExpert, moe
from soloist.ops.norm_linear import Norm, add_norm_gate_up
from soloist.ops.swiglu import swiglu


class Mlp(torch.nn.Module):
    """down(SiLU(gate x) * up x). Of a shared width a rank computes a summand; `forward` returns the sum."""

    def __init__(self, config: MlpConfig, hidden_size: int, dtype: torch.dtype):
        super().__init__()
        self.limit = config.limit
        self.gate_up = Linear(hidden_size, {"gate": config.width, "up": config.width}, dtype, bias=config.bias)
        self.down = Linear(config.width, {"weight": hidden_size}, dtype, bias=config.bias)

    def forward(self, stream: Stream, norm: Norm, rows: torch.Tensor | None = None) -> Stream:
        """rows: see `Window`. All rows share the weights, so none is worth leaving out."""
        if self.gate_up.bias is None:
            h, residual = add_norm_gate_up(*stream, norm, self.gate_up.operand, self.limit)
        else:
            gate_up, residual = self.gate_up.after(stream, norm)
            h = swiglu(gate_up, self.limit)
        return Stream(residual, self.down(h))

    @property
    def shared_expert(self) -> SharedExpert:
        """As the expert of every token; its biases, which no shared expert has, are left out."""
        assert self.gate_up.bias is None and self.down.bias is None
        return SharedExpert(self.gate_up.operand, self.down.operand, self.limit)


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

    def forward(self, stream: Stream, norm: Norm, rows: torch.Tensor | None = None) -> Stream:
        """rows: see `Window`."""
        c = self.config
        assert stream.branch is not None, "a mixer stands before"
        bias = self.selection_bias.weight if c.selection_bias else None
        routing = Routing(self.router.weight, bias, c.top_k, c.num_groups, c.top_groups, c.score, c.normalise, c.scaling)
        experts = RoutedExperts(self.experts.gate_up, self.experts.down, c.limit, self.experts.first)
        shared = None if c.shared is None else self.shared.shared_expert
        branch, residual = moe(stream.residual, stream.branch, norm, routing, experts, shared, rows)
        return Stream(residual, self._whole(branch))

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
