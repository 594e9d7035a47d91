"""The references agree: the naive Ling-3.0 with the golden files, and these with transformers as installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests import test_mtp
from tests.golden import ours
from tests.golden.cases import KINDS, LENGTH, LING, NAIVE_ONLY, ROWS, assert_equal, difference, golden, text
from tests.golden.oracle import TransformersMtp, naive_ling, transformers_logits
from tests.speculate import Driven, proposal

START = 70
"""Tokens of the text that the naive implementation reads here: more than one KDA chunk."""

NAIVE = tuple(kind for kind in LING if kind != "ling-yarn" and kind not in NAIVE_ONLY)
rows = list(ROWS)


@pytest.mark.parametrize("kind", NAIVE)
def test_naive_ling_equals_transformers_output_in_the_golden_files(kind: str) -> None:
    out, found = naive_ling(kind)(text(kind)[:START]), golden(kind)
    early = [i for i, row in enumerate(ROWS) if row < START]
    places = [ROWS[i] for i in early]
    assert_equal(out.logits[places], found["logits"][early], f"{kind}, logits")
    for i, stream in enumerate(out.layers):
        assert_equal(stream[places], found["layers"][i][early], f"{kind}, output of layer {i}")
    for i, chosen in out.routes.items():
        assert np.array_equal(chosen.sort(-1).values.numpy(), found[f"routes_{i}"][:START])


def test_negative_control_the_naive_law_without_clamps_differs() -> None:
    naive = naive_ling("ling-clamped")
    naive.config = {**naive.config, "expert_swiglu_limit_list": None}
    logits = naive(text("ling-clamped")[:5]).logits
    assert not difference(logits, golden("ling-clamped")["logits"][:5]).small


@pytest.mark.oracle
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NAIVE_ONLY])
def test_transformers_as_installed_agrees_with_us_and_with_the_golden_files(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.24")
    live = transformers_logits(tmp_path, kind, text(kind))
    assert_equal(live[rows], golden(kind)["logits"], f"{kind}, golden file")
    run = ours.prefill(ours.decoder(kind), text(kind), LENGTH)
    assert_equal(run.logits, live, f"{kind}, soloist")
    assert np.array_equal(run.logits.argmax(-1), live.argmax(-1))


@pytest.mark.oracle
@torch.inference_mode()
def test_mtp_equals_the_layer_made_of_transformers_blocks(tmp_path: Path) -> None:
    """Hidden state and logits of all rows, and chains from several places, by the drafter with its own cache."""
    pytest.importorskip("transformers", minversion="5.24")
    ids, model = text("ling-mtp"), ours.decoder("ling-mtp")
    state = ours.fresh(model, LENGTH)
    hidden = model(ids, state.prefill_window(LENGTH, 0), state.caches).hidden
    reference = TransformersMtp("ling-mtp", tmp_path)
    logits = reference.logits(reference.hidden(hidden[:-1], ids[1:]))
    places = [row for row in ROWS if row < LENGTH - 1]
    assert_equal(logits[places], golden("ling-mtp")["mtp_logits"], "golden file")
    for count in (1, 20, 70, 130):
        served = test_mtp.served(drafter := test_mtp.mtp(4))
        driven = Driven(served, test_mtp.params(), tuple(ids[:count].tolist()))
        whole = torch.tensor(driven.text)
        assert_equal(drafter._last, reference.hidden(hidden[:count], whole[1:])[-1:], f"row {count - 1}")
        assert proposal(served, 4) == reference.chain(hidden[:count], whole, 4), count
