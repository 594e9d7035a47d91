"""Kernels of long windows: small cases through Triton's interpreter, real sizes in bf16 on a GPU (`-m gpu`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import soloist.ops.gpu  # noqa: E402, F401
from soloist.layers.linear import prepare  # noqa: E402
from soloist.models.decoder import Decoder  # noqa: E402
from soloist.models.registry import read_config  # noqa: E402
from soloist.ops.gpu import moe_experts as moe_experts_kernels  # noqa: E402
from soloist.ops.gpu.moe_experts import moe_of_many  # noqa: E402
from soloist.ops.kda import kda_decode, kda_prefill  # noqa: E402
from soloist.ops.mla import mla_prefill  # noqa: E402
from soloist.ops.moe import RoutedExperts, Routing, SharedExpert, moe  # noqa: E402
from soloist.ops.moe_experts import moe_experts  # noqa: E402
from soloist.ops.norm_linear import gated_norm_linear  # noqa: E402
from soloist.ops.op import Op  # noqa: E402
from soloist.ops.paged_attention import fused_attention, prefill_attention  # noqa: E402
from soloist.ops.route import route  # noqa: E402
from soloist.ops.swiglu import swiglu  # noqa: E402
from soloist.runtime.assemble import choose_chunk  # noqa: E402
from soloist.state.sequence import Sequence  # noqa: E402
from soloist.weights.shapes import fill_random  # noqa: E402
from tests import models  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Arguments = dict[str, Any]


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def fast(op: Op, arguments: Arguments) -> Any:
    return op.impls["cuda"][op.choose("cuda")](**arguments)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def to_bf16(arguments: Arguments, *names: str) -> Arguments:
    return arguments | {name: arguments[name].bfloat16() for name in names}


def widened(arguments: Arguments) -> Arguments:
    """The same numbers in fp32, apart from the originals."""

    def wide(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(wide, value))
        if not isinstance(value, torch.Tensor):
            return value
        return value.float() if value.is_floating_point() and value.dtype != torch.float32 else value.clone()

    return {name: wide(value) for name, value in arguments.items()}


# -- experts


def experts_case(T: int, E: int, A: int, D: int, F: int, unused: int = 0) -> Arguments:
    g = torch.Generator().manual_seed(T)
    chosen = torch.stack([unused + torch.randperm(E - unused, generator=g)[:A] for _ in range(T)]).to(DEVICE)
    return {"x": randn(T, D), "weights": torch.rand(T, A, generator=g).to(DEVICE) + 0.1, "experts": chosen, "limit": 0.7,
            "gate_up": randn(E, 2 * F, D, seed=1, scale=D**-0.5), "down": randn(E, D, F, seed=2, scale=F**-0.5)}  # fmt: skip


def by_token(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
             limit: float) -> torch.Tensor:  # fmt: skip
    """Every expert for all tokens, in fp32."""
    out = torch.zeros_like(x)
    for e in range(gate_up.shape[0]):
        share = (weights * (experts == e)).sum(-1, keepdim=True)
        out += share * (swiglu.reference(x @ gate_up[e].T, limit) @ down[e].T)
    return out


@pytest.mark.parametrize("T, E, A, unused", [(150, 5, 2, 2), (40, 6, 3, 1), (1, 4, 4, 0)])
@pytest.mark.parametrize("tiles", ["EXACT", "FEW", "NARROW", "WIDE"])
def test_grouped_experts_equal_all_experts_of_all_tokens(
    T: int, E: int, A: int, unused: int, tiles: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that nobody chose, inner sizes that no tile divides; here with the tiles of 16-bit models, too."""
    if DEVICE == "cpu":
        monkeypatch.setattr(moe_experts_kernels, "EXACT", getattr(moe_experts_kernels, tiles))
    arguments = experts_case(T, E, A, 70, 41, unused)
    torch.testing.assert_close(fast(moe_experts, arguments), by_token(**arguments), rtol=1e-4, atol=1e-4)


def test_experts_that_weigh_nothing_are_left_out() -> None:
    """As of a rank that holds a part of them: what they would compute is never read."""
    arguments = experts_case(33, 6, 3, 48, 32)
    elsewhere = arguments["experts"] >= 4
    arguments["weights"][elsewhere] = 0.0
    arguments["experts"][elsewhere] = 3
    found = fast(moe_experts, arguments)
    torch.testing.assert_close(found, by_token(**arguments), rtol=1e-4, atol=1e-4)


def test_negative_control_another_expert_gives_another_result() -> None:
    arguments = experts_case(40, 6, 3, 48, 32)
    found = fast(moe_experts, arguments)
    arguments["experts"][7] = (arguments["experts"][7] + 1) % 6
    expected = by_token(**arguments)
    assert not torch.allclose(found[7], expected[7], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found[8:], expected[8:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first, held", [(0, 12), (4, 5)], ids=["all experts", "a rank's experts"])
@pytest.mark.parametrize("with_shared", [True, False])
def test_mixture_of_many_rows_equals_its_reference(first: int, held: int, with_shared: bool) -> None:
    T, E, D, F = 40, 12, 72, 32
    experts = RoutedExperts(randn(E, 2 * F, D, scale=D**-0.5)[first : first + held].contiguous(),
                            randn(E, D, F, seed=1, scale=F**-0.5)[first : first + held].contiguous(), 0.7, first)  # fmt: skip
    routing = Routing(randn(E, D, seed=2, scale=D**-0.5), randn(E, seed=3, scale=0.1), 3, 4, 2, "sigmoid", True, 2.5)
    shared = SharedExpert(randn(48, D, seed=4, scale=D**-0.5), randn(D, 24, seed=5, scale=0.2), 0.0) if with_shared else None
    arguments = (randn(T, D, seed=6), randn(T, D, seed=7), (randn(D, seed=8), 1e-6), routing, experts, shared)
    for found, expected in zip(moe_of_many(*arguments), moe.reference(*arguments), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# -- KDA


def kda_case(
    T: int, H: int, D: int, gate: float, same_keys: bool = False, start: int = 0, slots: int | None = None
) -> Arguments:
    """slots: as many as the recurrence takes, unless given."""
    A = H * D
    projected = randn(T, 5 * A + H)
    projected[:, 3 * A : 4 * A] += gate
    if same_keys:
        projected[:, A : 2 * A] = projected[:1, A : 2 * A]
        projected[:, 5 * A :] = 6.0  # beta near 1
    return {"projected": projected, "conv_weight": randn(3 * A, 4, seed=1), "rate": randn(H, seed=2).exp(),
            "bias": randn(H, D, seed=3), "lower_bound": -5.0, "history": randn(T + 40, 3 * A, seed=4),
            "states": randn(slots or T + 2, H, D, D, seed=5), "start": torch.tensor([start], device=DEVICE),
            "live": torch.tensor([1], device=DEVICE)}  # fmt: skip


def token_by_token(arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, last state) of the plain recurrence."""
    states = arguments["states"].clone()
    o = kda_decode.reference(**(arguments | {"states": states, "history": arguments["history"].clone()}))
    slots = states.shape[0]
    return o, states[(1 + o.shape[0]) % slots]


@pytest.mark.parametrize("gate, same_keys", [(0.0, False), (30.0, False), (-30.0, False), (-30.0, True)],
                         ids=["usual", "all forgotten", "nothing forgotten", "one key for ever"])  # fmt: skip
def test_long_window_equals_the_recurrence(gate: float, same_keys: bool) -> None:
    arguments = kda_case(100, 2, 24, gate, same_keys, start=11)
    expected, last = token_by_token(arguments)
    found = fast(kda_prefill, arguments)
    assert error(found, expected) < 1e-4
    assert error(arguments["states"][0], last) < 1e-4


def test_negative_control_a_state_that_starts_elsewhere_is_seen() -> None:
    arguments = kda_case(70, 2, 24, -3.0)
    expected, _ = token_by_token(arguments)
    arguments["live"] += 1
    assert error(fast(kda_prefill, arguments), expected) > 1e-2


def test_a_window_cut_at_a_chunk_has_the_same_bits() -> None:
    T, cut = 100, 64
    whole, parts = kda_case(T, 1, 24, 0.0, start=5), kda_case(T, 1, 24, 0.0, start=5)
    expected = fast(kda_prefill, whole)
    projected = parts["projected"]
    first = fast(kda_prefill, parts | {"projected": projected[:cut]})
    later = {"projected": projected[cut:], "start": parts["start"] + cut, "live": parts["live"] * 0}
    second = fast(kda_prefill, parts | later)
    assert torch.equal(torch.cat((first, second)), expected)
    assert torch.equal(parts["states"][0], whole["states"][0])
    kept = torch.arange(T + 2, T + 5, device=DEVICE) % whole["history"].shape[0]
    assert torch.equal(parts["history"][kept], whole["history"][kept])


def test_window_shorter_than_the_convolution_keeps_older_inputs() -> None:
    arguments = kda_case(2, 2, 24, 0.0, start=9)
    expected = arguments["history"].clone()
    expected[9:11] = arguments["projected"][:, : expected.shape[1]]
    fast(kda_prefill, arguments)
    assert torch.equal(arguments["history"], expected)


# -- the rest


def test_a_prompt_takes_long_passes_on_a_gpu_alone() -> None:
    assert choose_chunk("auto", torch.device("cpu")) == 512
    assert choose_chunk("auto", torch.device("cuda")) == 8192
    assert choose_chunk(77, torch.device("cuda")) == 77


@pytest.mark.gpu
@pytest.mark.parametrize("T", [17, 200, 3000])
def test_bf16_experts_of_real_size(T: int) -> None:
    arguments = to_bf16(experts_case(T, 128, 8, 1536, 512, 3), "x", "gate_up", "down")
    assert error(fast(moe_experts, arguments), by_token(**widened(arguments))) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("gate", [0.0, 30.0, -3.0])
def test_bf16_kda_of_real_size(gate: float) -> None:
    arguments = to_bf16(kda_case(1000, 16, 128, gate, slots=17), "projected", "history")
    wide = widened(arguments)
    expected = kda_prefill.reference(**wide)
    assert error(fast(kda_prefill, arguments), expected) < 1e-2
    assert error(arguments["states"][0], wide["states"][0]) < 1e-2


@pytest.mark.gpu
def test_routing_of_many_rows_is_that_of_the_reference() -> None:
    arguments = {"logits": randn(3001, 128, scale=2.0), "selection_bias": randn(128, seed=1, scale=0.1), "top_k": 8,
                 "num_groups": 8, "top_groups": 4, "score": "sigmoid", "normalise": True, "scaling": 2.5}  # fmt: skip
    weights, experts = fast(route, arguments)
    expected_weights, expected_experts = route.reference(**arguments)
    same = (experts == expected_experts).all(-1)
    assert same.float().mean() > 0.999  # sums of two scores may tie in one form and not in the other
    torch.testing.assert_close(weights[same], expected_weights[same], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_bf16_rows_between_products() -> None:
    T, H, D = 3000, 16, 128
    wide = randn(T, 3 * H * D).bfloat16()
    arguments = {"o": randn(T, H, D, seed=1), "gate": wide[:, H * D : 2 * H * D].view(T, H, D),
                 "norm": (randn(D, seed=2).bfloat16(), 1e-6),
                 "weight": randn(1536, H * D, seed=3, scale=0.02).bfloat16()}  # fmt: skip
    assert error(fast(gated_norm_linear, arguments), gated_norm_linear.reference(**widened(arguments))) < 1e-2
    gate_up = randn(T, 2 * 512).bfloat16()
    assert error(fast(swiglu, {"gate_up": gate_up, "limit": 0.7}), swiglu.reference(gate_up.float(), 0.7)) < 1e-2


def mla_case(T: int, start: int, H: int, N: int, Dr: int, R: int, Dv: int) -> Arguments:
    pages, positions = -(-(start + T) // 128), start + torch.arange(T, device=DEVICE)
    angles = randn(T, Dr // 2, seed=3, scale=50)
    return {"q": randn(T, H, N + Dr), "kv": randn(T, R + Dr, seed=1), "gate": randn(T, H, seed=2),
            "norm_weight": randn(R, seed=4), "eps": 1e-6, "up_key": randn(H, R, N, seed=5, scale=R**-0.5),
            "up_value": randn(H, Dv, R, seed=6, scale=R**-0.5), "cos": angles.cos(), "sin": angles.sin(), "interleaved": True,
            "latents": randn(pages, 1, 128, R + Dr, seed=7), "page": positions // 128, "offset": positions % 128,
            "table": None, "start": start, "scale": (N + Dr) ** -0.5}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("T, start", [(1000, 0), (333, 1000), (17, 130)])
def test_bf16_mla_of_real_size(T: int, start: int) -> None:
    numbers = ("q", "kv", "gate", "norm_weight", "up_key", "up_value", "latents")
    arguments = to_bf16(mla_case(T, start, 16, 128, 64, 512, 128), *numbers)
    wide = widened(arguments)
    assert error(fast(mla_prefill, arguments), mla_prefill.reference(**wide)) < 1e-2
    assert error(arguments["latents"], wide["latents"]) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("start", [0, 500])
@pytest.mark.parametrize("H, G, Dk, Dv", [(16, 16, 192, 128), (32, 8, 128, 128), (9, 3, 64, 64)])
def test_bf16_attention_of_a_prefill_takes_a_fused_kernel(start: int, H: int, G: int, Dk: int, Dv: int) -> None:
    T, S, fused = 700, 700 + start, torch.nn.attention.SDPBackend
    q, keys, values = randn(T, H, Dk).bfloat16(), randn(G, S, Dk, seed=1).bfloat16(), randn(G, S, Dv, seed=2).bfloat16()
    with torch.nn.attention.sdpa_kernel([fused.FLASH_ATTENTION, fused.EFFICIENT_ATTENTION, fused.CUDNN_ATTENTION]):
        found = fused_attention(q, keys, values, Dk**-0.5)
    expected = prefill_attention(q.float().cpu(), keys.float().cpu(), values.float().cpu(), start, Dk**-0.5)
    assert error(found.cpu(), expected) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["ling-tiny", "ling-flash", "qwen3-moe"])
def test_a_pass_over_a_prompt_never_waits_for_the_device(kind: str) -> None:
    with torch.inference_mode():
        device = torch.device("cuda")
        model = Decoder(read_config(models.CONFIGS[kind]), torch.bfloat16, device)
        fill_random(model)
        prepare(model)
        state = Sequence(model.cache_specs(), 512, 16, device)
        ids = models.ids(400).to(device)
        for again in range(2):
            state.reset(400)
            if again:
                torch.cuda.set_sync_debug_mode("error")
            try:
                for start, end in ((0, 300), (300, 400)):
                    hidden = model(ids[start:end], state.prefill_window(end - start, start), state.caches).hidden
                    state.commit_prefill(end - start)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert hidden.isfinite().all()
