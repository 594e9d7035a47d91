"""Where a round's time and bytes go: what is counted equals what shapes say, parts add up, kernels find their ops."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from soloist.bench.observe import round_calls
from soloist.bench.profile import profile, random_ids
from soloist.bench.trace import OUTSIDE, UNKNOWN, Events, ops_in_order, ops_of, replayed, replays_of
from soloist.cli import main
from soloist.cli.profile import as_lines
from soloist.ops.op import REGISTRY, observed
from soloist.runtime import traffic
from soloist.runtime.traffic import token_traffic
from soloist.testing.checkpoints import write_checkpoint
from tests.llms import GREEDY, PROMPT, fresh, shared

CONTEXT = 40


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(traffic.PROBE_BYTES, "cpu", 1 << 20)


def bytes_of(kind: str, widths: list[int], **settings: Any) -> list[Counter[str]]:
    llm = fresh(kind, settings={"context_length": 256, "prefix_cache_bytes": 0, **settings})
    counts = []
    for calls in round_calls(llm, random_ids(llm.model_config.vocab_size, CONTEXT), widths):
        counts.append(Counter[str]())
        for call in calls:
            counts[-1][call.op] += call.num_bytes
    return counts


@pytest.mark.parametrize("kind", ["ling-mtp", "llama", "qwen3-moe", "qwen3-tied"])
def test_a_plain_round_moves_the_bytes_that_its_shapes_say(kind: str) -> None:
    (counted,) = bytes_of(kind, [0])
    model = shared(kind).model_config
    row = 0 if not model.tied_head else model.hidden_size * 4  # looked up beside the head, which reads it with the others
    assert counted.total() == token_traffic(model, torch.float32, CONTEXT).total_bytes + row
    assert counted.total() != token_traffic(model, torch.float32, CONTEXT + 1).total_bytes + row


def test_more_rows_read_weights_once_and_write_a_state_each() -> None:
    one, four = bytes_of("ling-mtp", [0, 3], drafter="ngram", draft_width=3)
    assert one["add_norm_linear"] == four["add_norm_linear"] and one["linear"] == four["linear"]
    assert one["moe"] < four["moe"] < 4 * one["moe"]
    matrices = sum(2 * 4 * c.mixer.num_heads * c.mixer.head_dim**2 for c in _kda(shared("ling-mtp")))
    assert four["kda_decode"] - one["kda_decode"] == matrices * 3 / 2


def _kda(llm: Any) -> list[Any]:
    return [block for block in llm.model_config.blocks if type(block.mixer).__name__ == "KdaConfig"]


def test_a_drafters_own_passes_are_counted() -> None:
    plain, drafted = (bytes_of("ling-mtp", [width], drafter="mtp", draft_width=2)[0] for width in (0, 2))
    head = shared("ling-mtp").model_config.vocab_size * shared("ling-mtp").model_config.hidden_size * 4
    assert drafted["linear"] - plain["linear"] > 2 * head


def test_observing_leaves_no_trace() -> None:
    before = {name: op._chosen.get("cpu") for name, op in REGISTRY.items()}
    seen: list[str] = []

    @contextmanager
    def around(op: Any, args: Any, kwargs: Any) -> Iterator[None]:
        seen.append(op.name)
        yield

    llm = shared("llama")
    with pytest.raises(ZeroDivisionError), observed("cpu", around):
        llm.generate(PROMPT, GREEDY)
        raise ZeroDivisionError
    count = len(seen)
    llm.generate(PROMPT, GREEDY)
    assert count > 0 and len(seen) == count
    assert all(op._chosen["cpu"] == before[name] for name, op in REGISTRY.items() if before[name] is not None)


def test_parts_of_a_round_add_up_and_the_text_stays() -> None:
    llm = fresh("ling-mtp", settings={"context_length": 160, "drafter": "ngram", "draft_width": 2})
    text = llm.generate(PROMPT, GREEDY).token_ids
    found = profile(llm, random_ids(llm.model_config.vocab_size, CONTEXT), 2)
    assert found.rows == 3 and found.context == CONTEXT and found.gap_ms > 0
    assert sum(row.ms for row in found.table) + found.gap_ms == pytest.approx(found.watched_ms)
    assert all(sum(part.ms for part in row.parts) <= row.ms for row in found.table)
    blocks = llm.model_config.blocks
    assert {row.op: row.calls for row in found.table}["kda_decode"] == len(_kda(llm))
    assert found.experts is not None and blocks[-1].mlp.top_k <= found.experts <= 3 * blocks[-1].mlp.top_k  # type: ignore[union-attr]
    assert [row.ms for row in found.table] == sorted((row.ms for row in found.table), reverse=True)
    assert llm.generate(PROMPT, GREEDY).token_ids == text and llm.engine.widths.choose() == 2


# ---- traces of a GPU -------------------------------------------------------------------------------------------------


def launch(correlation: int, ts: float, name: str = "cuLaunchKernelEx") -> dict[str, Any]:
    return {"cat": "cuda_driver", "name": name, "ts": ts, "dur": 1, "args": {"correlation": correlation}}


def kernel(name: str, correlation: int, ts: float, dur: float) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}


def span(op: str, ts: float, dur: float) -> dict[str, Any]:
    return {"cat": "user_annotation", "name": op, "ts": ts, "dur": dur}


EAGER: Events = [
    span("op kda", 0, 10), span("op moe", 20, 10), span("ProfilerStep#1", 0, 99),
    launch(1, 2), launch(2, 5), launch(3, 15), launch(4, 21), launch(5, 29),
    kernel("down", 5, 140, 5), kernel("conv", 1, 100, 5), kernel("step", 2, 110, 5), kernel("cat", 3, 120, 5),
    kernel("up", 4, 130, 5),
]  # fmt: skip


def test_a_kernel_belongs_to_the_op_that_launched_it() -> None:
    assert ops_in_order(EAGER) == [("conv", "kda"), ("step", "kda"), ("cat", OUTSIDE), ("up", "moe"), ("down", "moe")]
    shifted = [{**e, "ts": e["ts"] + 13} if e["cat"] == "user_annotation" else e for e in EAGER]
    assert ops_in_order(shifted) != ops_in_order(EAGER)


def replay(correlation: int, ts: float) -> list[dict[str, Any]]:
    """conv 0-4, step 3-9 (begins before conv ends), a gap of 2, up 11-14, down 14-15."""
    return [
        launch(correlation, ts - 50, "cudaGraphLaunch"), kernel("conv", correlation, ts, 4),
        kernel("step", correlation, ts + 3, 6), kernel("up", correlation, ts + 11, 3), kernel("down", correlation, ts + 14, 1),
    ]  # fmt: skip


def test_time_of_a_replay_is_shared_out_without_rest() -> None:
    cut = replay(9, 1000)[:3]
    groups = replayed([*replay(7, 100), *replay(8, 200), *cut, kernel("copy", 77, 5000, 9)])
    assert [[k.name for k in group] for group in groups] == [["conv", "step", "up", "down"]] * 2
    found = replays_of(groups, ops_of(["conv", "step", "up", "down"], ops_in_order(EAGER)))
    assert {row.op: round(row.ms * 1e3, 6) for row in found.rows} == {"kda": 9, "moe": 4}
    assert (found.count, found.span_ms, found.gap_ms) == (2, pytest.approx(0.015), pytest.approx(0.002))
    (kda, _) = found.rows
    assert [(p.name, p.calls, round(p.ms * 1e3, 6)) for p in kda.parts] == [("conv", 1, 4), ("step", 1, 5)]


def test_a_kernel_that_no_op_launched_is_unknown_and_disturbs_no_other() -> None:
    known = ops_in_order(EAGER)
    assert ops_of(["conv", "new", "step", "up", "down"], known) == ["kda", UNKNOWN, "kda", "moe", "moe"]
    assert replayed([kernel("conv", 1, 0, 1)]) == []


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("profile"), "ling-mtp")


def test_the_command_prints_a_table_a_record_and_a_trace(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["profile", "-m", str(folder), "--context", "30", "--rounds", "2", "--threads", "1", "--context-length", "200"]
    assert main([*words, "--rows", "3", "--json", "--trace", str(tmp_path / "t.json")]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["rows"], record["drafter"], record["context"]) == (3, "scripted", 30)
    assert record["num_bytes"] == sum(row["num_bytes"] for row in record["table"]) and record["limit_ms"] > 0
    trace = json.loads((tmp_path / "t.json").read_text())
    assert sum(e.get("name") == "op moe" for e in trace["traceEvents"]) >= 3
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "rounds of 1 rows behind 30 tokens" in shown and "of the limit" in shown and "moe_experts" in shown


@pytest.mark.parametrize("line, said", [
    ("--rounds 0", "--rounds 0 must be at least 1"), ("--rows 17", "from 1 to 16"), ("--context 0", "at least 1"),
    ("--rows 2 --drafter mtp", "--rows 2 stands for a drafter"), ("--trace /no/x.json", "no folder"),
    ("--context 1000 --context-length 512", "lower --context"), ("--contxt 3", "did you mean --context"),
])  # fmt: skip
def test_a_mistake_is_one_line_and_code_2(folder: Path, line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "-m", str(folder), *line.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and said in shown.err and shown.err.count("\n") == 1


def test_a_share_of_the_limit_is_never_given_without_bytes() -> None:
    llm = fresh("llama", settings={"context_length": 160})
    lines = as_lines(profile(llm, random_ids(llm.model_config.vocab_size, 20), 1))
    (finish,) = (line for line in lines if line.startswith("finish_round"))
    assert finish.count("%") == 1
