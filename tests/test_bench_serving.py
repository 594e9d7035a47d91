"""The same card in process and through a server of our own: the same tokens, and a difference in time that is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from soloist.bench.card import card_of
from soloist.bench.prepare import Server
from soloist.bench.records import RunFile
from soloist.bench.run import run_card
from soloist.llm import LLM
from soloist.runtime import traffic
from soloist.testing.checkpoints import write_checkpoint

pytest.importorskip("uvicorn")
from tests.serving import serving

SETTINGS = {"context_length": 96, "device": "cpu", "prefix_cache_bytes": 0}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFile, RunFile]:
    """In process, and through a server."""
    folder = tmp_path_factory.mktemp("serving")
    model = str(write_checkpoint(folder / "model", "llama", tokenizer=True))
    card = card_of(
        {
            "name": "tiny", "model": model, "settings": {"context_length": 96, "device": "cpu"},
            "workloads": [{"name": "random", "prompts": "random", "input_tokens": 8, "num_prompts": 3, "output_tokens": 24},
                          {"name": "drawn", "prompts": "random", "input_tokens": 9, "num_prompts": 1, "output_tokens": 12,
                           "temperature": 1.0}],
            "variants": [{"name": "n-gram", "drafter": "ngram", "draft_width": 2}],
        },
        "tiny",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(traffic.PROBE_BYTES, "cpu", 1 << 22)
        inside = run_card(card, folder / "in.json")
        with serving(LLM(model, drafter="ngram", draft_width=2, **SETTINGS)) as server:
            outside = run_card(card, folder / "out.json", server=Server(server.url, reference=model))
    return inside, outside


def test_a_server_writes_the_tokens_of_the_same_card_in_process(both: tuple[RunFile, RunFile]) -> None:
    inside, outside = both
    assert inside.passed and outside.passed and outside.card.target == "http"
    texts = [[r.token_ids_sha256 for r in run.requests] for run in both]
    assert texts[0] == texts[1] and len(set(texts[0])) == 4
    for name in ("prompts_sha256", "input_tokens", "output_tokens"):
        assert [getattr(w, name) for w in inside.card.workloads] == [getattr(w, name) for w in outside.card.workloads]
    assert (inside.card.weights, inside.card.tokenizer) == (outside.card.weights, outside.card.tokenizer)


def test_rounds_and_their_acceptance_are_told_through_the_server(both: tuple[RunFile, RunFile]) -> None:
    for a, b in zip(both[0].requests, both[1].requests, strict=True):
        assert (a.rounds, a.drafted, a.accepted) == (b.rounds, b.drafted, b.accepted)
        assert [block.n for block in a.blocks] == [block.n for block in b.blocks]


def test_what_serving_costs_stands_beside_the_time_of_the_client(both: tuple[RunFile, RunFile]) -> None:
    """The server's clock starts when a request has come, and stops before its chunk leaves."""
    inside, outside = both
    assert not any("server_tpot_ms" in s.distributions for s in inside.summaries)
    for s in outside.summaries:
        assert s.distributions["server_tpot_ms"].n == s.distributions["tpot_ms"].n
    for r in outside.requests:
        clocks = [block.server_ms or -1.0 for block in r.blocks]
        assert clocks == sorted(clocks) and all(0 <= ms <= block.t_ms for ms, block in zip(clocks, r.blocks, strict=True))
    assert "repetition_penalty" in outside.plans["n-gram"]["dialect"] and "token ids" in outside.plans["n-gram"]["dialect"]


def test_a_server_with_other_weights_fails_the_card(both: tuple[RunFile, RunFile], tmp_path: Path) -> None:
    other = str(write_checkpoint(tmp_path / "other", "llama", tokenizer=True, seed=1))
    card = dataclasses.replace(both[0].card, workloads=both[0].card.workloads[:1], warm_up=0)
    model = card.model
    with serving(LLM(other, drafter="ngram", draft_width=2, **SETTINGS)) as server:
        found = run_card(card, tmp_path / "x.json", server=Server(server.url, reference=model))
    assert not found.passed and all(r.regret and r.regret > 0.1 for r in found.requests)
