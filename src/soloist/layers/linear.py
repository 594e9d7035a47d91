"""Linear layers, alone or fused from several checkpoint matrices that read the same input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from soloist.dist.share import Share
from soloist.ops.linear import PackedWeight, Weight, linear, linear_fp32, pack
from soloist.ops.norm_linear import Norm, add_norm_linear, normed


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised inference parameter on the default device; the loader fills it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def prepare(model: nn.Module) -> None:
    """Bring the filled weights of all parts into the form the ops read. Call once, after loading."""
    for module in model.modules():
        if isinstance(module, Prepared):
            module.prepare()


@runtime_checkable
class Prepared(Protocol):
    """A module whose weights change their form once they are filled."""

    def prepare(self) -> None: ...


class Slotted(nn.Module):
    """A module that a checkpoint fills slot by slot: `slots()` names the views to copy into, `shapes()` their shapes.

    A size in a shape may be a rank's Share: of the stored tensor the slot then takes that part. A slot that has a shape
    and no view is filled by another rank.
    """

    def slots(self) -> dict[str, torch.Tensor]:
        raise NotImplementedError(type(self).__name__)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(view.shape) for name, view in self.slots().items()}


class Vector(Slotted):
    """One parameter tensor of any shape, in slot `weight`."""

    def __init__(self, *shape: int, dtype: torch.dtype):
        super().__init__()
        self.shape = shape
        self.weight = parameter(*shape, dtype=dtype)

    def slots(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": self.shape}


class Stream(NamedTuple):
    """The residual stream [T, D], and the branch [T, D] that its next reader has to add to it."""

    residual: torch.Tensor
    branch: torch.Tensor | None = None

    @property
    def whole(self) -> torch.Tensor:
        """[T, D]."""
        return self.residual if self.branch is None else self.residual + self.branch

    def normed(self, norm: Norm) -> torch.Tensor:
        """The norm of the whole: [T, D]."""
        return normed(self.residual, self.branch, norm)[0]


class Linear(Slotted):
    """y = x W^T (+ b) for matrices stacked along the output: slots `<part>` and `<part>.bias`.

    Parts that are shares make a rank's part of y. With a shared input every rank has a summand of y: `forward` returns
    the sum, and whoever multiplies with `operand` passes the product through `whole`.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], dtype: torch.dtype, bias: bool = False):
        super().__init__()
        self.parts, self.in_features = dict(parts), in_features
        out_features = sum(parts.values())
        self.weight: nn.Parameter | None = parameter(out_features, in_features, dtype=dtype)
        self.bias = parameter(out_features, dtype=dtype) if bias else None
        self._operand: PackedWeight | None = None

    def slots(self) -> dict[str, torch.Tensor]:
        assert self.weight is not None, "packed weights cannot be filled"
        found: dict[str, torch.Tensor] = {}
        first = 0
        for part, size in self.parts.items():
            found[part] = self.weight[first : first + size]
            if self.bias is not None:
                found[f"{part}.bias"] = self.bias[first : first + size]
            first += size
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {part: (size, self.in_features) for part, size in self.parts.items()}
        if self.bias is not None:
            found |= {f"{part}.bias": (size,) for part, size in self.parts.items()}
        return found

    def prepare(self) -> None:
        """Pack the weight for this machine's matrix kernel and free the plain one. Call after loading."""
        if self.weight is not None:
            self._operand = pack(self.weight.data)
            if self._operand is not None:
                self.weight = None

    @property
    def operand(self) -> Weight:
        """What `ops.linear` multiplies with."""
        if self._operand is not None:
            return self._operand
        assert self.weight is not None
        return self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.in_features, Share):
            return self.whole(linear(x, self.operand))
        return linear(x, self.operand, self.bias)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The product in fp32, of a layer without bias."""
        assert self.bias is None and not isinstance(self.in_features, Share)
        return linear_fp32(x, self.operand)

    def whole(self, y: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' products [T, N], without bias, and the bias once. Changes nothing for one rank."""
        if not isinstance(self.in_features, Share):
            return y
        y = self.in_features.group.all_reduce(y)
        return y if self.bias is None else y + self.bias

    def after(self, stream: Stream, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """(this product of the stream's norm, the stream as one tensor)."""
        assert not isinstance(self.in_features, Share), "a norm needs the whole input"
        return add_norm_linear(stream.residual, stream.branch, norm, self.operand, self.bias)
