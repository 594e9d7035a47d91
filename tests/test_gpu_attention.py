"""The attention kernels through Triton's interpreter: a row's bits, and the runs that the context is cut into."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

import soloist.ops.gpu  # noqa: E402, F401
from soloist.ops.gpu.attention import num_runs, run_first, run_of, run_size  # noqa: E402
from soloist.ops.gqa import gqa_round  # noqa: E402
from soloist.ops.mla import mla_round  # noqa: E402
from soloist.ops.op import Op  # noqa: E402
from soloist.ops.paged_attention import fused_attention, prefill_attention  # noqa: E402
from tests.test_ops import draw  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def spans_kernel(first_ptr, size_ptr, run_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    first = run_first(i)
    tl.store(first_ptr + i, first)
    tl.store(size_ptr + i, run_size(i))
    tl.store(run_ptr + i, run_of(first))


def test_runs_cover_every_position_once_and_do_not_depend_on_the_context() -> None:
    N = 1024
    first, size, run = (torch.empty(N, dtype=torch.int32, device=DEVICE) for _ in range(3))
    spans_kernel[(1,)](first, size, run, N)
    assert torch.equal(first.cpu(), torch.cat((torch.zeros(1), size.cpu()[:-1].cumsum(0))).int())
    assert run.tolist() == list(range(N))
    begins = first.tolist()
    assert [num_runs(begin + 1) for begin in begins] == list(range(1, N + 1))
    assert [num_runs(begin) for begin in begins[1:]] == list(range(1, N))


def rows_alone(op: Op, arguments: dict[str, Any], by_row: tuple[str, ...]) -> list[torch.Tensor]:
    """The window's rows, one call each, from the first on."""
    found = []
    for j in range(arguments[by_row[0]].shape[0]):
        own = {name: arguments[name][j : j + 1] for name in by_row}
        found.append(op.impls["cuda"]["triton"](**(arguments | own | {"start": arguments["start"] + j})))
    return found


def on_device(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for name, v in arguments.items()}


MLA_ROWS = ("q", "kv", "gate", "cos", "sin", "page", "offset")


GQA_ROWS = ("qkv", "cos", "sin", "page", "offset")


@pytest.mark.parametrize(
    "op, by_row, case",
    [
        pytest.param(op, by_row, case, id=f"{op.name}-{case.__name__}")
        for op, by_row in ((mla_round, MLA_ROWS), (gqa_round, GQA_ROWS))
        for case in op.cases[1:3]
    ],
)
def test_row_has_the_same_bits_alone_and_in_a_window(op: Op, by_row: tuple[str, ...], case: Any) -> None:
    together = op.impls["cuda"]["triton"](**on_device(draw(case)))
    alone = rows_alone(op, on_device(draw(case)), by_row)
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("op, caches", [(mla_round, ("latents",)), (gqa_round, ("keys", "values"))], ids=["mla", "gqa"])
def test_row_has_the_same_bits_in_a_longer_context(op: Op, caches: tuple[str, ...]) -> None:
    """Pages beyond the context add nothing, not even rounding."""
    short, long = on_device(draw(op.cases[0])), on_device(draw(op.cases[0]))
    for name in caches:
        stale = torch.randn(70, *long[name].shape[1:], device=DEVICE)
        long[name] = torch.cat((long[name], stale))
    run = op.impls["cuda"]["triton"]
    assert torch.equal(run(**short), run(**long))


def test_negative_control_a_row_sees_the_rows_before_it() -> None:
    """Rows that are told another place must not get the same bits."""
    case = mla_round.cases[1]
    together = mla_round.impls["cuda"]["triton"](**on_device(draw(case)))
    shifted = on_device(draw(case))
    shifted["start"] = shifted["start"] - 1
    assert not torch.equal(together, torch.cat(rows_alone(mla_round, shifted, MLA_ROWS)))


@pytest.mark.parametrize("T, S, H, G, Dk, Dv", [(5, 5, 4, 4, 24, 16), (3, 9, 6, 2, 16, 16), (1, 7, 4, 2, 16, 16)])
def test_prefill_in_the_fused_form_equals_the_plain_one(T: int, S: int, H: int, G: int, Dk: int, Dv: int) -> None:
    g = torch.Generator().manual_seed(3)
    q, keys, values = torch.randn(T, H, Dk, generator=g), torch.randn(G, S, Dk, generator=g), torch.randn(G, S, Dv, generator=g)
    expected = prefill_attention(q, keys, values, S - T, Dk**-0.5)
    found = fused_attention(q.to(DEVICE), keys.to(DEVICE), values.to(DEVICE), Dk**-0.5).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
