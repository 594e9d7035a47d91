"""The Triton kernels. Here they run through Triton's interpreter on the small cases, on a GPU (`-m gpu`) for real."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import soloist.drafters.dspark  # noqa: E402, F401  these import every op
import soloist.drafters.mtp  # noqa: E402, F401
import soloist.models.registry  # noqa: E402, F401
import soloist.ops.gpu  # noqa: E402, F401
import soloist.ops.moe  # noqa: E402, F401
import soloist.runtime.engine  # noqa: E402, F401
from soloist.ops.linear import linear  # noqa: E402
from soloist.ops.moe import RoutedExperts  # noqa: E402
from soloist.ops.norm_linear import normed  # noqa: E402
from soloist.ops.op import REGISTRY, Op  # noqa: E402
from soloist.ops.route import route  # noqa: E402
from tests.test_ops import as_tuple, draw  # noqa: E402

SMALL = 300_000
"""Elements of a case up to which the interpreter is quick."""

IMPLS = [
    pytest.param(op, impl, case, id=f"{name}-{impl}-{case.__name__}")
    for name, op in REGISTRY.items()
    for impl in op.impls.get("cuda", {})
    if impl != "cuda"  # compiled C++, see test_gpu_bf16
    for case in op.cases
]


def moved(value: Any, device: str) -> Any:
    """A drawn argument on the device."""
    if isinstance(value, tuple):
        parts = [moved(v, device) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device)


def size(arguments: dict[str, Any]) -> int:
    return sum(v.numel() for v in arguments.values() if isinstance(v, torch.Tensor))


def check(op: Op, impl: str, case: Any, device: str) -> None:
    """Results and written arguments equal those of the reference."""
    expected_arguments, found_arguments = draw(case), {k: moved(v, device) for k, v in draw(case).items()}
    expected = as_tuple(op.reference(**expected_arguments))
    found = as_tuple(op.impls["cuda"][impl](**found_arguments))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=op.rtol, atol=op.atol)
    for name, value in expected_arguments.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found_arguments[name].cpu(), value, rtol=op.rtol, atol=op.atol)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted")
@pytest.mark.parametrize("op, impl, case", IMPLS)
def test_interpreted_kernel_equals_reference(op: Op, impl: str, case: Any) -> None:
    if size(draw(case)) > SMALL:
        pytest.skip("too large for the interpreter")
    check(op, impl, case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("op, impl, case", IMPLS)
def test_kernel_equals_reference(op: Op, impl: str, case: Any) -> None:
    check(op, impl, case, "cuda")


def poisoned(arguments: dict[str, Any], count: int) -> dict[str, Any]:
    """The arguments of `moe` with NaN in all experts that none of the first `count` rows chooses."""
    x, _ = normed(arguments["residual"][:count], arguments["branch"][:count], arguments["norm"])
    wanted = route(linear(x, arguments["routing"].weight).float(), *arguments["routing"][1:])[1].unique()
    gate_up, down, *rest = arguments["experts"]
    others = torch.ones(len(down), dtype=torch.bool).index_fill(0, wanted, False)
    spoilt = (weight.masked_fill(others[:, None, None], float("nan")) for weight in (gate_up, down))
    return arguments | {"experts": RoutedExperts(*spoilt, *rest)}


def check_counted(name: str, number: int, count: int, device: str) -> None:
    """The first rows have the same bits if the others do not count, and experts of the others alone are not read."""
    op, arguments = REGISTRY[name], draw(REGISTRY[name].cases[number])
    run, found = op.impls["cuda"]["triton"], []
    few = draw(op.cases[number]) if name != "moe" else poisoned(arguments, count)
    for given, rows in ((arguments, None), (few, torch.tensor([count], device=device))):
        results = as_tuple(run(**{k: moved(v, device) for k, v in given.items()}, rows=rows))
        found.append(results[0][:count])
    assert torch.equal(*found)


COUNTED = [("moe", 1, 2), ("moe", 2, 9), ("moe", 2, 1), ("kda_decode", 1, 3)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled, not interpreted")
@pytest.mark.parametrize("name, number, count", COUNTED)
def test_interpreted_rows_that_do_not_count_change_no_others(name: str, number: int, count: int) -> None:
    check_counted(name, number, count, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name, number, count", COUNTED)
def test_rows_that_do_not_count_change_no_others(name: str, number: int, count: int) -> None:
    check_counted(name, number, count, "cuda")


def test_negative_control_an_expert_that_is_read_in_vain_is_seen() -> None:
    spoilt = poisoned(draw(REGISTRY["moe"].cases[1]), 2)
    assert REGISTRY["moe"].reference(**spoilt)[0].isnan().any()
