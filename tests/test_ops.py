"""Every op, implementation and case: equal to the reference, and with the same bits for a row beside any other rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import soloist.drafters.dspark  # noqa: F401  these import every op
import soloist.drafters.mtp  # noqa: F401
import soloist.models.registry  # noqa: F401
import soloist.runtime.engine  # noqa: F401
from soloist.ops.finish_round import WRITTEN
from soloist.ops.op import REGISTRY, Op

CASES = [pytest.param(op, case, id=f"{name}-{case.__name__}") for name, op in REGISTRY.items() for case in op.cases]
IMPLS = [
    pytest.param(op, impl, case, id=f"{name}-{impl}-{case.__name__}")
    for name, op in REGISTRY.items()
    for impl in op.impls.get("cpu", {})
    for case in op.cases
]


def draw(case: Any) -> dict[str, Any]:
    return case(torch.Generator().manual_seed(7))


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def call(op: Op, arguments: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    name, *others = arguments
    return as_tuple(op(arguments[name], **{other: arguments[other] for other in others}))


@pytest.mark.parametrize("op, impl, case", IMPLS)
def test_implementation_equals_reference(op: Op, impl: str, case: Any) -> None:
    expected = as_tuple(op.reference(**draw(case)))
    found = as_tuple(op.impls["cpu"][impl](**draw(case)))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=op.rtol, atol=op.atol)


@pytest.mark.parametrize("op, case", [p for p in CASES if p.values[0].rows])
def test_row_has_the_same_bits_alone_and_in_a_window(op: Op, case: Any) -> None:
    arguments = draw(case)
    together = call(op, arguments)
    for j in range(next(iter(arguments.values())).shape[0]):
        alone = {name: value[j : j + 1] if name in op.rows and value is not None else value for name, value in arguments.items()}
        for whole, row in zip(together, call(op, alone), strict=True):
            assert torch.equal(whole[j : j + 1], row), (op.name, j)


@pytest.mark.parametrize("op, case", CASES)
def test_op_leaves_arguments_alone_that_it_does_not_list_as_written(op: Op, case: Any) -> None:
    written = {"short_conv": {"history"}, "kda_step": {"states"}, "kda_decode": {"history", "states"},
               "kda_chunk": {"states"}, "kda_prefill": {"history", "states"}, "finish_round": WRITTEN,
               "ngram_draft": {"tokens", "chances"},
               "mla_round": {"latents"}, "mla_prefill": {"latents"}, "gqa_round": {"keys", "values"}}  # fmt: skip
    arguments, untouched = draw(case), draw(case)
    call(op, arguments)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and name not in written.get(op.name, ()):
            assert torch.equal(value, untouched[name]), name


def test_negative_control_a_row_dependent_sum_is_caught() -> None:
    """The row test must see what BLAS does to a plain product of one row."""
    x, weight = torch.randn(16, 131), torch.randn(300, 131)
    together = torch.nn.functional.linear(x, weight)
    alone = torch.cat([torch.nn.functional.linear(x[j : j + 1], weight) for j in range(16)])
    if torch.backends.mkl.is_available():
        assert not torch.equal(together, alone)
