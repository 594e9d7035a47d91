"""What an op is: a reference in plain torch, faster implementations, and the cases that all of them must pass.

The reference is the public function and the CPU path. `@op` wraps it; `@the_op.impl(name, on=device)` adds an
implementation for one device type. The first call on a device type chooses one and freezes it; `chosen_ops()` shows
what was chosen. Cases feed one generic test, the benchmark and the docs table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

import torch

Case = Callable[[torch.Generator], dict[str, Any]]
"""Draws the keyword arguments of one call. Its `__name__` and closure name the case in tests."""

REGISTRY: dict[str, Op] = {}


class Op:
    """A callable with one contract and several implementations."""

    def __init__(self, reference: Callable[..., Any], cases: Sequence[Case], rtol: float, atol: float, rows: str):
        self.name = reference.__name__
        self.__doc__ = reference.__doc__
        self.reference = reference
        self.cases = tuple(cases)
        self.rtol, self.atol = rtol, atol
        self.rows = tuple(rows.split())
        self.impls: dict[str, dict[str, Callable[..., Any]]] = {}
        self._chosen: dict[str, tuple[str, Callable[..., Any]]] = {}
        REGISTRY[self.name] = self

    def impl(self, name: str, on: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the decorated function as implementation `name` on device type `on`; the last one wins."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            self.impls.setdefault(on, {})[name] = function
            return function

        return register

    def choose(self, device_type: str) -> str:
        """Choose and freeze the implementation for a device type; returns its name."""
        if device_type not in self._chosen:
            if device_type == "cuda":
                import_module("soloist.ops.gpu")
            offered = self.impls.get(device_type, {})
            name = next(reversed(offered), "reference")
            self._chosen[device_type] = (name, offered.get(name, self.reference))
        return self._chosen[device_type][0]

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device_type = x.device.type
        if device_type not in self._chosen:
            self.choose(device_type)
        return self._chosen[device_type][1](x, *args, **kwargs)


Around = Callable[[Op, tuple[Any, ...], dict[str, Any]], AbstractContextManager[None]]


@contextmanager
def observed(device_type: str, around: Around) -> Iterator[None]:
    """While it lasts every call of an op on this device type, those inside other ops too, runs within
    `around(op, args, kwargs)`. Costs nothing when it does not last.
    """

    def within(each: Op, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with around(each, args, kwargs):
                return function(*args, **kwargs)

        return call

    for each in REGISTRY.values():
        each.choose(device_type)
    before = {each: each._chosen[device_type] for each in REGISTRY.values()}
    for each, (name, function) in before.items():
        each._chosen[device_type] = (name, within(each, function))
    try:
        yield
    finally:
        for each, chosen in before.items():
            each._chosen[device_type] = chosen


def op(
    *, cases: Sequence[Case], rtol: float = 1e-5, atol: float = 1e-5, rows: str = ""
) -> Callable[[Callable[..., Any]], Op]:
    """Make the decorated reference an Op.

    rows: names of the arguments whose first dimension is the window. Such an op gives every row the same bits
    whatever rows stand beside it; the generic test calls it with T rows and with T times one row.
    """

    def wrap(reference: Callable[..., Any]) -> Op:
        return Op(reference, cases, rtol, atol, rows)

    return wrap


def chosen_ops() -> dict[str, dict[str, str]]:
    """Per device type: op name -> implementation in use."""
    table: dict[str, dict[str, str]] = {}
    for name, each in sorted(REGISTRY.items()):
        for device_type, (chosen, _) in each._chosen.items():
            table.setdefault(device_type, {})[name] = chosen
    return table
