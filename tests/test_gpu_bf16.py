"""The round's heavy kernels in bf16 at real sizes, on a GPU: close to fp32 references, and rows that do not see each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import soloist.ops.gpu  # noqa: E402, F401
from soloist.ops.kda import kda_decode  # noqa: E402
from soloist.ops.linear import linear, linear_fp32  # noqa: E402
from soloist.ops.mla import mla_round  # noqa: E402
from soloist.ops.moe import RoutedExperts, Routing, SharedExpert, moe  # noqa: E402
from soloist.ops.norm_linear import add_norm_gate_up, add_norm_linear, gated_norm_linear  # noqa: E402
from soloist.ops.op import Op  # noqa: E402

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
MOST = 16
Arguments = dict[str, Any]


def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def weight(*shape: int) -> torch.Tensor:
    return draw(*shape, scale=shape[-1] ** -0.5)


def product(K: int, N: int, **more: Any) -> Callable[[], Arguments]:
    return lambda: {"x": draw(MOST, K), "weight": weight(N, K), **{key: draw(*shape) for key, shape in more.items()}}


def behind_norm(K: int, N: int, branch: bool = True, **more: Any) -> Callable[[], Arguments]:
    def arguments() -> Arguments:
        return {"residual": draw(MOST, K), "branch": draw(MOST, K) if branch else None, "norm": (draw(K), 1e-6),
                "weight": weight(N, K), **more}  # fmt: skip

    return arguments


def gated(H: int, D: int, N: int) -> Callable[[], Arguments]:
    def arguments() -> Arguments:
        wide = draw(MOST, 3 * H * D)  # the gate lies in the middle of a projection
        return {"o": draw(MOST, H, D, dtype=torch.float32), "gate": wide[:, H * D : 2 * H * D].view(MOST, H, D),
                "norm": (draw(D), 1e-6), "weight": weight(N, H * D)}  # fmt: skip

    return arguments


def experts(E: int, top_k: int, groups: int, D: int, F: int, shared: bool, score: str = "sigmoid",
            router: torch.dtype = torch.float32) -> Callable[[], Arguments]:  # fmt: skip
    def arguments() -> Arguments:
        bias = draw(E, scale=0.1, dtype=torch.float32) if score == "sigmoid" else None
        routing = Routing(weight(E, D).to(router), bias, top_k, groups, max(1, groups // 2), score, True, 2.5)  # type: ignore[arg-type]
        both = SharedExpert(weight(2 * F, D), weight(D, F), 0.0) if shared else None
        return {"residual": draw(MOST, D), "branch": draw(MOST, D), "norm": (draw(D), 1e-6), "routing": routing,
                "experts": RoutedExperts(weight(E, 2 * F, D), weight(E, D, F), 0.0), "shared": both}  # fmt: skip

    return arguments


STATELESS: dict[str, tuple[Op, Callable[[], Arguments]]] = {
    "linear-odd": (linear, product(320, 849)),
    "linear-out": (linear, product(2048, 1536)),
    "linear-deep": (linear, product(9728, 200, bias=(200,))),
    "logits": (linear_fp32, product(1536, 157184)),
    "norm-in": (add_norm_linear, behind_norm(1536, 10256, bias=None)),
    "norm-alone": (add_norm_linear, behind_norm(256, 3072, branch=False, bias=None)),
    "norm-576": (add_norm_linear, behind_norm(576, 1000, bias=None)),
    "gate-up": (add_norm_gate_up, behind_norm(1536, 9216, limit=0.0)),
    "gate-up-limit": (add_norm_gate_up, behind_norm(320, 2 * 84, limit=0.7)),
    "gated-16": (gated_norm_linear, gated(16, 128, 1536)),
    "gated-4": (gated_norm_linear, gated(4, 128, 320)),
    "moe-tiny": (moe, experts(128, 8, 8, 1536, 512, True)),
    "moe-nano": (moe, experts(16, 4, 4, 320, 64, True)),
    "moe-wide": (moe, experts(512, 8, 8, 320, 96, True)),
    "moe-qwen": (moe, experts(128, 8, 1, 2048, 768, False, "softmax", BF16)),
}


def kda_arguments(H: int, start: int) -> Arguments:
    A, D = 128 * H, 128
    return {"projected": draw(MOST, 5 * A + H), "conv_weight": draw(3 * A, 4, dtype=torch.float32),
            "rate": draw(H, dtype=torch.float32).exp(), "bias": draw(H, D, dtype=torch.float32), "lower_bound": -5.0,
            "history": draw(20, 3 * A), "states": draw(17, H, D, D, dtype=torch.float32),
            "start": torch.tensor([start], device="cuda"), "live": torch.tensor([15], device="cuda")}  # fmt: skip


def mla_arguments(sizes: tuple[int, int, int, int, int], start: int) -> Arguments:
    H, N, DR, R, DV = sizes
    pages = (start + MOST) // 32 + 2
    positions = start + torch.arange(MOST, device="cuda")
    angles = draw(MOST, DR // 2, scale=50, dtype=torch.float32)
    wide = draw(MOST, R + DR + H + (-H) % 8)
    return {"q": draw(MOST, H, N + DR), "kv": wide[:, : R + DR], "gate": wide[:, R + DR : R + DR + H], "norm_weight": draw(R),
            "eps": 1e-6, "up_key": weight(H, R, N), "up_value": weight(H, DV, R), "cos": angles.cos(), "sin": angles.sin(),
            "interleaved": True, "latents": draw(pages, 1, 32, R + DR), "page": positions // 32, "offset": positions % 32,
            "table": None, "start": torch.tensor([start], device="cuda"), "scale": (N + DR) ** -0.5}  # fmt: skip


TINY, NANO = (16, 128, 64, 512, 128), (4, 64, 32, 128, 64)
STATEFUL: dict[str, tuple[Op, Callable[[], Arguments]]] = {
    "kda-16": (kda_decode, lambda: kda_arguments(16, 1000)),
    "kda-4": (kda_decode, lambda: kda_arguments(4, 0)),
    "mla-empty": (mla_round, lambda: mla_arguments(TINY, 0)),
    "mla-70": (mla_round, lambda: mla_arguments(TINY, 70)),
    "mla-8190": (mla_round, lambda: mla_arguments(TINY, 8190)),
    "mla-40000": (mla_round, lambda: mla_arguments(TINY, 40000)),
    "mla-nano": (mla_round, lambda: mla_arguments(NANO, 300)),
}
WINDOWED = ("projected", "q", "kv", "gate", "cos", "sin", "page", "offset")
"""Arguments of stateful ops that have a row a window row."""

CASES = {**STATELESS, **STATEFUL}
IMPLS = [(name, impl) for name, (op, _) in CASES.items() for impl in op.impls["cuda"]]


@pytest.fixture(autouse=True)
def seeded() -> object:
    torch.manual_seed(7)
    with torch.inference_mode():
        yield


def tree(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The value with every tensor in it changed."""
    if isinstance(value, tuple):
        parts = [tree(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return change(value) if isinstance(value, torch.Tensor) else value


def results(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def widened(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype == BF16 else x.clone()


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("name", "impl"), IMPLS, ids=lambda value: value)
@pytest.mark.parametrize("T", [1, 3, 16])
def test_bf16_kernel_is_close_to_the_fp32_reference(name: str, impl: str, T: int) -> None:
    op, arguments = CASES[name]
    drawn = arguments()
    for key in (*op.rows, *(WINDOWED if name in STATEFUL else ())):
        if drawn.get(key) is not None:
            drawn[key] = drawn[key][:T]
    wide = {key: tree(value, widened) for key, value in drawn.items()}
    if wide.get("branch") is not None:  # the stream is stored in bf16; a router must not see another one
        wide["residual"] = (drawn["residual"] + drawn["branch"]).float()
        wide["branch"] = torch.zeros_like(wide["residual"])
    found = results(op.impls["cuda"][impl](**drawn))
    for a, b in zip(found, results(op.reference(**wide)), strict=True):
        assert distance(a, b) < 1.5e-2
    for key in ("history", "states", "latents"):
        if key in drawn:
            assert distance(drawn[key], wide[key]) < 1e-2, key


@pytest.mark.parametrize(("name", "impl"), [each for each in IMPLS if each[0] in STATELESS], ids=lambda value: value)
def test_bf16_rows_do_not_depend_on_the_window(name: str, impl: str) -> None:
    op, arguments = STATELESS[name]
    drawn, run = arguments(), op.impls["cuda"][impl]

    def window(first: int, T: int) -> list[torch.Tensor]:
        part = {key: value[first : first + T] if key in op.rows and value is not None else value for key, value in drawn.items()}
        return [x.clone() for x in results(run(**part))]

    alone = [torch.cat(rows) for rows in zip(*(window(t, 1) for t in range(MOST)), strict=True)]
    for T in range(2, MOST + 1):
        for first in {0, MOST - T}:
            for a, b in zip(window(first, T), alone, strict=True):
                assert torch.equal(a, b[first : first + T]), (T, first)


@pytest.mark.parametrize(("name", "impl"), [each for each in IMPLS if each[0] in STATEFUL], ids=lambda value: value)
def test_bf16_window_leaves_what_single_rows_leave(name: str, impl: str) -> None:
    op, arguments = STATEFUL[name]
    drawn, run = arguments(), op.impls["cuda"][impl]
    written = [key for key in ("history", "states", "latents") if key in drawn]
    before = {key: drawn[key].clone() for key in written}

    def window(first: int, T: int) -> torch.Tensor:
        part = {key: value[first : first + T] if key in WINDOWED else value for key, value in drawn.items()}
        part |= {key: drawn[key] + first for key in ("start", "live") if key in drawn}
        if "live" in part:
            part["live"] %= drawn["states"].shape[0]
        return run(**part).clone()

    alone = torch.cat([window(t, 1) for t in range(MOST)])
    after = {key: drawn[key].clone() for key in written}
    for T in range(2, MOST + 1):
        for key in written:
            drawn[key].copy_(before[key])
        found = torch.cat([window(first, min(T, MOST - first)) for first in range(0, MOST, T)])
        assert torch.equal(found, alone), T
        assert all(torch.equal(drawn[key], after[key]) for key in written), T


COUNTING = [each for each in IMPLS if CASES[each[0]][0] in (moe, kda_decode)]


@pytest.mark.parametrize(("name", "impl"), COUNTING, ids=lambda value: value)
def test_bf16_rows_that_do_not_count_change_no_others(name: str, impl: str) -> None:
    op, arguments = CASES[name]
    drawn, run = arguments(), op.impls["cuda"][impl]
    for count in (1, 3, 9, MOST):
        found = []
        for rows in (None, torch.tensor([count], device="cuda")):
            state = {key: drawn[key].clone() for key in ("history", "states") if key in drawn}
            found.append(results(run(**drawn | state, rows=rows))[0][:count].clone())
        assert torch.equal(*found), count
