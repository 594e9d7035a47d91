"""The NEXTN drafter: its maths, its cache under any acceptance, and text that does not depend on it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from soloist.config import MAX_WINDOW, EngineConfig, SamplingParams
from soloist.dist.vocabulary import Logits
from soloist.drafters.drafter import Drafter, NoDraft
from soloist.drafters.mtp import MtpDrafter, build_mtp
from soloist.drafters.width import FixedWidth, WidthChoice
from soloist.errors import UserError
from soloist.models.decoder import Decoder, Output
from soloist.ops.noise import gumbel
from soloist.runtime.assemble import assemble
from soloist.runtime.engine import Engine, Request
from soloist.runtime.round import Parts
from soloist.state.buffers import Buffers
from soloist.state.sequence import Sequence
from soloist.testing.checkpoints import random_tensors, write_checkpoint
from soloist.weights.checkpoint import open_checkpoint
from tests import models, speculate
from tests.golden import ours
from tests.golden.cases import config_of, text
from tests.naive_ling import NaiveLing
from tests.speculate import CONTEXT, Cheap, Driven, Steered, V, run, tokens

PROMPT = tuple(text("ling-mtp")[:20].tolist())
WIDTH = 6


def served(
    drafter: Drafter, rejection: bool = False, chunk: int = 512, widths: WidthChoice | None = None
) -> Engine:
    model = ours.decoder("ling-mtp")
    state = Sequence(model.cache_specs(), CONTEXT, MAX_WINDOW, torch.device("cpu"))
    bufs = Buffers(V, CONTEXT + MAX_WINDOW + 1, torch.device("cpu"))
    return Engine(Parts(model, state, bufs, drafter), V, chunk, widths or FixedWidth(drafter.width), rejection)


def mtp(width: int, kind: type[MtpDrafter] = MtpDrafter, temperatures: list[float] | None = None) -> MtpDrafter:
    built = build_mtp(ours.decoder("ling-mtp"), width, temperatures)
    return kind(built.layer, width, built.temperatures)


def params(temperature: float = 0.0, count: int = 12) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=5, max_tokens=count)


@cache
def plain(temperature: float, count: int = 12) -> list[int]:
    return tokens(run(served(NoDraft()), params(temperature, count), PROMPT))


class Forgetful(MtpDrafter):
    """Leaves the rows as the chain wrote them, but for the last."""

    def observe(self, out: Output, following: torch.Tensor, n: torch.Tensor) -> None:
        kept = [cache.clone() for cache in self._caches]
        super().observe(out, following, n)
        if not out.window.prefill:
            for cache, before in zip(self._caches, kept, strict=True):
                cache.copy_(before)


class OneLate(MtpDrafter):
    """Takes the row before the last one kept."""

    def observe(self, out: Output, following: torch.Tensor, n: torch.Tensor) -> None:
        super().observe(out, following, n - 1)


def naive_chain(naive: NaiveLing, hidden: torch.Tensor, ids: list[int], width: int) -> tuple[list[int], float]:
    """Drafts after ids by the formulas alone, and the smallest lead of a draft over the next best.

    hidden [len(ids) - 1, D]: the model's, after its final norm.
    """
    following, drafts, lead = ids[1:], [], float("inf")
    for _ in range(width):
        out = naive_hidden(naive, hidden, torch.tensor(following))
        best = (out[-1] @ naive.w("lm_head.weight").T).topk(2)
        drafts.append(int(best.indices[0]))
        lead = min(lead, float(best.values[0] - best.values[1]))
        hidden, following = torch.cat((hidden, out[-1:])), [*following, drafts[-1]]
    return drafts, lead


def naive_hidden(naive: NaiveLing, hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """The layer's output after its norm; the naive model itself gives logits only."""
    head = naive.tensors["lm_head.weight"]
    unit = torch.eye(head.shape[1], dtype=torch.float64).numpy()
    return NaiveLing(naive.config, {**naive.tensors, "lm_head.weight": unit}).mtp_logits(hidden, following)


@pytest.mark.parametrize("chunk", [7, 512])
def test_chained_drafts_are_those_of_the_naive_law_after_every_round(chunk: int) -> None:
    answer = plain(0.0)
    drafter = Steered(mtp(3), answer)
    engine = served(drafter, chunk=chunk)
    results = run(engine, params(), PROMPT)
    config = config_of("ling-mtp")
    naive = NaiveLing(config, random_tensors(config))
    hidden = naive(torch.tensor([*PROMPT, *answer])).hidden
    end, close = len(PROMPT), 0
    for result, proposed in zip(results, drafter.proposed, strict=False):
        end += len(result.tokens)
        drafts, lead = naive_chain(naive, hidden[: end - 1], [*PROMPT, *answer][:end], 3)
        assert lead < 1e-4 or proposed == drafts, end
        close += lead < 1e-4
    assert len(drafter.proposed) >= 4 and close <= 1
    assert {len(result.tokens) for result in results[1:]} >= {1, 2}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_text_does_not_depend_on_the_drafter(temperature: float) -> None:
    answer = plain(temperature)
    for width in range(1, 16):
        assert tokens(run(served(mtp(width)), params(temperature), PROMPT)) == answer, width
    assert tokens(run(served(Steered(mtp(WIDTH), answer)), params(temperature), PROMPT)) == answer


def watched(kind: type[MtpDrafter], temperature: float = 0.0) -> list[tuple[int, list[int], list[int]]]:
    return speculate.watch(mtp(WIDTH, kind), mtp(WIDTH, kind), served, params(temperature), PROMPT)


def test_watcher_proposals_are_those_of_a_fresh_drafter_fed_token_by_token() -> None:
    found = watched(MtpDrafter)
    assert len(found) > 6 and len({emitted for emitted, _, _ in found}) > 2, "the acceptance was not mixed"
    for emitted, proposed, fresh in found:
        assert proposed == fresh, emitted


def test_negative_control_rows_left_from_the_chain_are_caught_by_the_watcher() -> None:
    assert any(proposed != fresh for _, proposed, fresh in watched(Forgetful))


def test_negative_control_drafting_from_a_row_too_early_is_caught_by_the_watcher() -> None:
    assert any(proposed != fresh for _, proposed, fresh in watched(OneLate))


def test_confidence_is_the_chance_of_the_best_token_and_temperatures_divide_its_logit() -> None:
    seen: list[torch.Tensor] = []

    def noted(logits: Logits, places: torch.Tensor) -> tuple[torch.Tensor, None]:
        seen.append(torch.softmax(logits.whole, -1).amax(-1))
        return speculate.argmax(logits, places)

    drafter = mtp(5, temperatures=[1.0, 2.0, 0.5])
    engine = served(drafter)
    run(engine, params(), PROMPT)
    speculate.proposal(engine, 4, draw=noted)
    expected = torch.sigmoid(torch.logit(torch.cat(seen)) / torch.tensor([1.0, 2.0, 0.5, 0.5]))
    assert drafter.confidence is not None
    torch.testing.assert_close(drafter.confidence[:4], expected)
    assert 0 < float(drafter.confidence.min()) and mtp(5).confidence is None


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_text_does_not_depend_on_what_the_confidence_makes_of_it(temperature: float) -> None:
    drafter = mtp(WIDTH, temperatures=[1.0])
    results = run(served(drafter, widths=Cheap(WIDTH)), params(temperature, 24), PROMPT)
    assert tokens(results) == plain(temperature, 24)
    assert len({result.verified for result in results[1:]}) > 1


def test_own_cache_lies_in_the_pages_that_snapshots_share() -> None:
    engine = served(mtp(3))
    run(engine, params(), PROMPT)
    state = engine.parts.sequence
    own = engine.parts.drafter._caches
    assert all(any(cache is each for each in state.caches) for cache in own)
    assert all(bool(cache[0, :, : len(PROMPT)].abs().sum(-1).all()) for cache in own)


def test_sampled_drafts_share_the_noise_of_the_final_pick() -> None:
    """A layer as good as the model would be accepted always: its law is the model's, so its draw is too."""

    class Knowing(MtpDrafter):
        def propose(self, bufs, window, draw):
            state = served(NoDraft())
            place = int(window.positions[0])
            ids = bufs.history[: place + 1].tolist()
            for j in range(window.width):
                logits = state.logits(tuple(ids))[-1:]
                token, law = draw(Logits(logits, V), window.positions[j : j + 1] + 1)
                assert law is None
                ids.append(int(token))
            return torch.tensor(ids[-window.width :])

    results = run(served(mtp(5, Knowing)), params(1.0, 13), PROMPT)
    assert tokens(results) == plain(1.0, 13)
    assert [len(result.tokens) for result in results[1:]] == [6] * 2


def test_rejection_gets_the_law_the_drafts_were_drawn_from() -> None:
    drafter = mtp(4)
    engine = served(drafter, rejection=True)
    for result in engine.run(Request(PROMPT, (), params(0.8))):
        assert result is not None
        if result.drafted:
            assert drafter.law is not None and drafter.law.shape == (4, V)
            torch.testing.assert_close(drafter.law.sum(-1), torch.ones(4))
    assert run(served(mtp(4), rejection=True), params(0.0), PROMPT)[-1].tokens


def test_a_draft_is_the_argmax_of_its_law_with_the_noise_of_its_place() -> None:
    drafter = mtp(4)
    driven = Driven(served(drafter, rejection=True), params(0.8), PROMPT)
    sampler = driven._sampler
    drafts = speculate.proposal(driven.served, 4, draw=sampler.draft)
    assert drafter.law is not None
    places = torch.arange(len(PROMPT), len(PROMPT) + 4) + 1
    noise = gumbel(places, driven.served.parts.bufs.seed, V)
    assert (drafter.law.log() + noise).argmax(-1).tolist() == drafts


def test_the_checkpoints_own_layer_is_chosen_by_itself(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "ling-mtp")
    built = assemble(EngineConfig(str(folder), drafter="auto", draft_width=3), open_checkpoint(folder))
    assert (built.plan.drafter, built.plan.draft_width) == ("mtp", 3)
    results = run(built.engine, params(), PROMPT)
    assert tokens(results) == plain(0.0)
    assert all(result.drafted == 3 for result in results[1:])


def test_a_model_without_or_with_two_layers_is_refused() -> None:
    two = {**models.LING, "num_nextn_predict_layers": 2}
    for config, count in ((models.CONFIGS["ling-tiny"], 0), (two, 2)):
        decoder = Decoder(models.read_config(config), torch.float32, torch.device("meta"))
        with pytest.raises(UserError, match=f"the checkpoint has {count}"):
            build_mtp(decoder, 3)
