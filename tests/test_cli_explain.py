"""`soloist explain`: the plan that a run would use, the ops that would run, and the bytes that a token needs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from soloist.cli import main
from soloist.cli.explain import resolved
from soloist.config import EngineConfig, MoeConfig
from soloist.llm import LLM
from soloist.ops.op import REGISTRY, chosen_ops
from soloist.runtime import traffic
from soloist.runtime.traffic import token_traffic
from soloist.testing.checkpoints import random_tensors, write_checkpoint
from soloist.testing.configs import CONFIGS

KINDS = ["ling-mtp", "ling-tiny", "llama", "qwen3-moe", "qwen3-tied"]


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(traffic.PROBE_BYTES, "cpu", 1 << 22)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write_checkpoint(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def explained(capsys: pytest.CaptureFixture[str], folder: Path, *flags: str) -> dict[str, Any]:
    assert main(["explain", "-m", str(folder), *flags, "--json"]) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return record


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_is_that_of_a_run(kind: str, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    drafting: dict[str, Any] = {"drafter": "ngram", "draft_width": 3}
    for flags, settings in (([], {}), (["--drafter", "ngram", "--draft-width", "3"], drafting)):
        record = explained(capsys, folders[kind], *flags, "--threads", "1", "--context-length", "200")
        with LLM(model=str(folders[kind]), threads=1, context_length=200, **settings) as llm:
            assert record["plan"] == dataclasses.asdict(llm.plan)


def test_the_ops_are_those_that_run(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    table = {row["op"]: row["implementation"] for row in explained(capsys, folders["ling-mtp"])["ops"]}
    assert set(table) == set(REGISTRY)
    with LLM(model=str(folders["ling-mtp"]), threads=1) as llm:
        llm.generate([1, 2, 3])
    assert table.items() >= chosen_ops()["cpu"].items()


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_token_are_counted_from_the_public_tensors(kind: str, folders: dict[str, Path]) -> None:
    """The same count from the other side: names and shapes of the checkpoint, not the parameters of our modules."""
    plan, model = resolved(EngineConfig(model=str(folders[kind])))
    expected = 0.0
    for name, values in random_tensors(CONFIGS[kind]).items():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else 0
        if layer >= model.num_layers:
            continue  # an MTP layer takes no part in plain decoding
        share = 1.0
        if ".experts." in name:
            mlp = model.blocks[layer].mlp
            assert isinstance(mlp, MoeConfig)
            share = mlp.top_k / mlp.num_experts
        elif "embed" in name and not model.tied_head:
            share = 1 / model.vocab_size
        expected += 4 * values.size * share
    found = token_traffic(model, torch.float32, 100)
    assert found.weight_bytes == pytest.approx(expected, rel=1e-6)
    assert found.active_parameters * 4 == pytest.approx(found.weight_bytes, rel=1e-6)
    assert found.active_parameters < plan.num_parameters or model.tied_head


def test_bytes_of_the_state_grow_with_the_context_for_attention_only(folders: dict[str, Path]) -> None:
    _, llama = resolved(EngineConfig(model=str(folders["llama"])))
    fields = CONFIGS["llama"]
    width = fields["num_key_value_heads"] * fields["hidden_size"] // fields["num_attention_heads"]
    expected = 2 * fields["num_hidden_layers"] * width * 4
    states = [token_traffic(llama, torch.float32, context).state_bytes for context in (0, 1, 1000)]
    assert states == [0, expected, 1000 * expected]
    _, ling = resolved(EngineConfig(model=str(folders["ling-mtp"])))
    assert token_traffic(ling, torch.float32, 0).state_bytes > 0  # KDA matrices have one size


def test_no_weights_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-4:] = b"\x00\x00\xc0\x7f"  # NaN, which loading refuses
    file.write_bytes(data)
    assert main(["generate", "-m", str(folder), "--prompt-ids", "1", "--threads", "1"]) == 2
    assert "NaN" in capsys.readouterr().err
    assert explained(capsys, folder)["plan"]["architecture"] == "LlamaForCausalLM"


def test_limits_are_bytes_over_the_measured_rate(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    record = explained(capsys, folders["llama"])
    assert [row["context"] for row in record["limits"]] == [128, 512]
    for row in record["limits"]:
        seconds = (row["weight_bytes"] + row["state_bytes"]) / record["read_bytes_per_s"]
        assert row["tpot_ms"] == pytest.approx(seconds * 1e3)
        assert row["tokens_per_s"] == pytest.approx(1 / seconds)


def test_the_text_holds_what_the_json_holds(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "-m", str(folders["ling-mtp"])]) == 0
    text = capsys.readouterr().out
    record = explained(capsys, folders["ling-mtp"])
    for word in (*record["plan"], *(row["op"] for row in record["ops"]), *record["model"]["mixers"], "GB/s"):
        assert word in text
