"""What a round really touches: every call of an op, and the bytes of weights and state that it has to move.

Counted where the ops are called, so a drafter's own passes count as they happen, and of experts those that were chosen.
Activations are left out: they stay in caches. `runtime/traffic.py` says the same of plain decoding from shapes alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from soloist.config import MAX_WINDOW, SamplingParams
from soloist.llm import LLM, StreamEvent
from soloist.ops.linear import PackedWeight, linear
from soloist.ops.norm_linear import normed
from soloist.ops.op import Op, observed
from soloist.ops.route import route
from soloist.runtime.engine import Engine
from soloist.runtime.round import Parts
from soloist.runtime.runner import EagerRunner
from soloist.state.sequence import Recurrent


@dataclass(frozen=True)
class Call:
    """A call of an op by the model or the drafter. What it moves: fixed_bytes, and position_bytes for every position of the
    context. experts: how many different ones it chose, 0 for other ops.
    """

    op: str
    context: int
    fixed_bytes: int
    position_bytes: int
    experts: int

    @property
    def num_bytes(self) -> int:
        return self.fixed_bytes + self.position_bytes * self.context


@dataclass
class Observer:
    """Notes the calls of one round while `watching`. context: committed positions, which attention has to read."""

    engine: Engine
    context: int
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        parts = self.engine.parts
        drafter = [value for value in vars(parts.drafter).values() if isinstance(value, nn.Module)]
        self._weights = {_place(t) for part in (parts.model, *drafter) for m in part.modules() for t in _held(m)}
        self._paged = {_place(cache) for cache in parts.sequence.positional}
        self._recurrent = {_place(cache.states): cache for cache in parts.sequence.recurrent}
        self._depth = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        with observed(self.engine.parts.sequence.device.type, self._around):
            yield

    @contextmanager
    def _around(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        if not self._depth:
            self._depth += 1  # what the counting calls is not counted
            self.calls.append(self._call(op, args, kwargs))
            self._depth -= 1
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _call(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        tensors = list(_tensors((*args, *kwargs.values())))
        rows = tensors[0].shape[0] if tensors else 0
        experts, fixed, position_bytes = 0, 0.0, 0
        if op.name == "moe":
            experts, num_experts = _experts(*args, **kwargs), args[3].weight.shape[0]
        for tensor in tensors:
            place = _place(tensor)
            if place in self._recurrent:
                fixed += _recurrent_bytes(self._recurrent[place], rows)
            elif place in self._paged:
                position_bytes += _bytes(tensor[0, :, 0])
            elif place in self._weights and op.name == "embed":
                fixed += _bytes(tensor[0]) * rows
            elif place in self._weights:
                stacked = op.name == "moe" and tensor.dim() == 3
                fixed += _bytes(tensor) * (experts / num_experts if stacked else 1)
        return Call(op.name, self.context, round(fixed), position_bytes, experts)


def _held(module: nn.Module) -> Iterator[torch.Tensor]:
    """A module's own tensors: parameters, and what `prepare` made of them."""
    yield from module.parameters(recurse=False)
    yield from _tensors(vars(module).values())


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, PackedWeight):
            yield value.packed
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _place(tensor: torch.Tensor) -> int:
    """What tells a tensor and its views from others. One in oneDNN's layout has no address and no views."""
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _recurrent_bytes(cache: Recurrent, rows: int) -> int:
    """Conv inputs, the live matrix read, and one matrix written for each row."""
    return (cache.conv_width - 1) * _bytes(cache.history[0]) + (1 + rows) * _bytes(cache.states[0])


def _experts(residual: Any, branch: Any, norm: Any, routing: Any, experts: Any, *rest: Any, **named: Any) -> int:
    """How many different experts the window chooses, of those that lie here."""
    x, _ = normed(residual, branch, norm)
    _, chosen = route(linear(x.to(routing.weight.dtype), routing.weight).float(), *routing[1:])
    places = chosen.unique() - experts.first
    return int(((places >= 0) & (places < experts.down.shape[0])).sum())


# ---- rounds to be watched --------------------------------------------------------------------------------------------


class WatchedRunner(EagerRunner):
    """Runs every round op by op, within a context that `watch(number)` gives, and verifies all drafts."""

    def __init__(self, parts: Parts, watch: Callable[[int], AbstractContextManager[None]]):
        super().__init__(dataclasses.replace(parts, trims=False))
        self._watch, self._count = watch, 0

    def launch(self, *args: Any, **kwargs: Any) -> None:
        with self._watch(self._count):
            super().launch(*args, **kwargs)
        self._count += 1


@dataclass
class SetWidths:
    """A WidthChoice that knows beforehand: the widths in order, the last one ever after."""

    widths: Sequence[int]
    candidates: Sequence[int] = ()
    adapts = False
    plain_ms: float | None = None
    _next: int = 0

    def begin(self, confidence: Sequence[float] | None) -> None:
        self._next = 0

    def choose(self, sure: int = 0) -> int:
        self._next += 1
        return self.widths[min(self._next, len(self.widths)) - 1]

    def tell(self) -> None:
        return None

    def learn(self, *round: Any) -> None:
        pass


@contextmanager
def rounds_of(
    llm: LLM,
    prompt: Sequence[int],
    widths: Sequence[int],
    count: int,
    watch: Callable[[int], AbstractContextManager[None]] | None = None,
) -> Iterator[Iterator[StreamEvent]]:
    """The events of `count` rounds of these widths, the prefill's taken; run op by op where `watch` is given.

    The room behind the prompt must hold them: `room_for`.
    """
    engine = llm.engine
    runner, choice = engine.runner, engine.widths
    engine.widths = SetWidths(widths)
    if watch is not None:
        engine.runner = WatchedRunner(engine.parts, watch)
        if llm.group.size > 1:
            engine.runner.lookahead = runner.lookahead  # other ranks launch as many rounds ahead as before
    events = llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=room_for(widths, count), ignore_eos=True))
    try:
        next(events)
        yield events
    finally:
        events.close()  # type: ignore[attr-defined]
        engine.runner, engine.widths = runner, choice


def room_for(widths: Sequence[int], count: int) -> int:
    """Tokens that `count` rounds may emit, with those that are launched ahead."""
    return (count + 2) * (max(widths) + 1) + MAX_WINDOW


def round_calls(llm: LLM, prompt: Sequence[int], widths: Sequence[int]) -> list[list[Call]]:
    """The calls of one round of each width behind the prompt. One round of the first runs before, and is not told."""
    observers = {number + 1: Observer(llm.engine, len(prompt)) for number in range(len(widths))}

    def watch(number: int) -> AbstractContextManager[None]:
        return observers[number].watching() if number in observers else nullcontext()

    with rounds_of(llm, prompt, [widths[0], *widths], len(widths) + 1, watch) as events:
        for _ in range(len(widths) + 1):
            next(events)
    return [observer.calls for observer in observers.values()]
