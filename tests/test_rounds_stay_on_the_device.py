"""A round never asks the device for a number: no drafter, and nothing that a request can ask of the sampler, does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from soloist.config import SamplingParams
from soloist.drafters.drafter import Drafter, NoDraft
from soloist.drafters.ngram import NgramDrafter
from soloist.drafters.scripted import ScriptedDrafter
from soloist.ops import moe
from soloist.ops.moe_experts import moe_experts
from soloist.runtime.engine import Engine
from soloist.runtime.round import draft, settle
from soloist.runtime.sampler import Sampler
from tests import test_dspark_model, test_mtp
from tests.dspark_files import write_drafter
from tests.speculate import PROMPT, Cheap, Driven, engine

READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::item", "aten::unique_dim",
         "aten::_unique2", "aten::repeat_interleave", "aten::is_nonzero", "aten::equal"}  # fmt: skip
"""Operations whose result, or whose shape, the host has to wait for."""


class Watch(TorchDispatchMode):
    """Refuses what would make the host wait, and host data on its way to the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        boolean = name in ("aten::index", "aten::index_put", "aten::index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in READS or boolean or name in ("aten::lift_fresh", "aten::lift_fresh_copy"):
            raise AssertionError(f"{name} in a round")
        return func(*args, **(kwargs or {}))


def unwatched(experts: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The CPU's experts are grouped on the host; a GPU's are not."""

    def call(*given: Any) -> torch.Tensor:
        with _disable_current_modes():
            return experts(*given)

    return call


ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "noise": {"temperature": 0.8},
    "truncated": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.2},
    "biased": {"temperature": 0.0, "logit_bias": {3: 2.0, 7: -100.0}},
    "min_tokens": {"temperature": 0.7, "min_tokens": 9, "stop_token_ids": (5, 6)},
    "logprobs": {"temperature": 0.7, "logprobs": 3},
    "grammar": {"temperature": 0.7, "response_format": {"type": "regex", "regex": "a+"}},
}


def rounds(served: Engine, asked: SamplingParams, prompt: tuple[int, ...] = PROMPT) -> None:
    """Rounds of several widths, each watched the second time, when everything has been used once. The model itself is
    not watched: its ops on a CPU may read what they like.
    """
    driven, parts = Driven(served, asked, prompt), served.parts
    places = tensors_of(parts.drafter)
    for width in {0, parts.drafter.width, min(2, parts.drafter.width)}:
        for watch in (nullcontext, Watch):
            with torch.inference_mode():
                with watch():
                    window, ids = draft(parts, driven._sampler, len(driven.text) + width + 1, width)
                out = parts.model(ids, window, parts.sequence.caches, parts.drafter.taps)
                with watch():
                    output = settle(parts, driven._sampler, out)
                driven._take(output)
    assert tensors_of(parts.drafter) == places, "a captured round knows the drafter's state by its place"


def tensors_of(drafter: Drafter) -> dict[str, int]:
    """Where the drafter's own tensors lie; the law is made anew in every round, which reads it itself."""
    own = {name: value for name, value in vars(drafter).items() if isinstance(value, torch.Tensor) and name != "law"}
    return {name: value.data_ptr() for name, value in own.items()}


@pytest.mark.parametrize("rejection", [False, True], ids=["equality", "rejection"])
@pytest.mark.parametrize("name", ASKED)
def test_no_wish_of_a_request_makes_a_round_wait(name: str, rejection: bool) -> None:
    rounds(engine("llama", ScriptedDrafter((1, 2, 3), 4), rejection=rejection), SamplingParams(**ASKED[name], seed=3))


@pytest.mark.parametrize("rejection", [False, True], ids=["equality", "rejection"])
@pytest.mark.parametrize("name", ["greedy", "noise"])
def test_no_drafter_makes_a_round_wait(
    name: str, rejection: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe, "moe_experts", unwatched(moe_experts))
    asked = SamplingParams(**ASKED[name], seed=3)
    for drafter in (NoDraft(), NgramDrafter(4), ScriptedDrafter((1, 2, 3), 4)):
        rounds(engine("llama", drafter, rejection=rejection), asked)
    rounds(test_mtp.served(test_mtp.mtp(4), rejection), asked, test_mtp.PROMPT)
    for head in ("gated", "rnn", "infill", "dflash", "reduced"):
        facts = test_dspark_model.HEADS[head]
        write_drafter(tmp_path / head, facts, "speculators", 6)
        rounds(test_dspark_model.served(test_dspark_model.load(tmp_path / head), rejection), asked)


@pytest.mark.parametrize("name", ["greedy", "noise", "grammar"])
def test_no_round_waits_that_chooses_what_it_verifies(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe, "moe_experts", unwatched(moe_experts))
    asked = SamplingParams(**ASKED[name], seed=3)
    write_drafter(tmp_path, test_dspark_model.HEADS["vanilla"], "speculators", 6)
    for served, prompt in (
        (engine("llama", NgramDrafter(4), Cheap(4)), PROMPT),
        (test_mtp.served(test_mtp.mtp(4, temperatures=[1.0]), widths=Cheap(4)), test_mtp.PROMPT),
        (test_dspark_model.served(test_dspark_model.load(tmp_path), widths=Cheap(4)), PROMPT),
    ):
        assert served.parts.trims
        rounds(served, asked, prompt)


@pytest.mark.parametrize("name", ASKED)
def test_a_request_leaves_its_wishes_where_the_last_one_did(name: str) -> None:
    """A captured round knows tensors by their place."""
    bufs = engine("llama", NoDraft()).parts.bufs
    places = {key: value.data_ptr() for key, value in vars(bufs).items()}
    sampler = Sampler(SamplingParams(**ASKED[name]), bufs)
    assert {key: value.data_ptr() for key, value in vars(bufs).items()} == places
    assert not [key for key, value in vars(sampler).items() if isinstance(value, torch.Tensor)]


def test_requests_of_one_mode_run_the_same_ops_and_others_do_not() -> None:
    bufs = engine("llama", NoDraft()).parts.bufs
    modes = [Sampler(SamplingParams(**asked), bufs).mode for asked in ASKED.values()]
    assert len(set(modes)) == len(modes)
    assert Sampler(SamplingParams(temperature=0.3, seed=1), bufs).mode == modes[list(ASKED).index("noise")]


@pytest.mark.parametrize("wait", [
    lambda x: x.item(), lambda x: int(x), lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: bool(x.sum() > 0),
    lambda x: torch.tensor([1, 2]), lambda x: x.repeat_interleave(x.long()),
])  # fmt: skip
def test_negative_control_what_waits_is_seen(wait: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(AssertionError, match="in a round"), Watch():
        wait(torch.ones(1))
