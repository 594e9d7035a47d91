"""Running a card: order, warm-up, texts, flags, Ctrl+C; first on targets with known answers, then on real models."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from soloist.bench.card import card_of
from soloist.bench.files import read_run, rounds_path
from soloist.bench.flags import find_flags
from soloist.bench.inprocess import InProcess
from soloist.bench.pinned import pinned_script, round_lengths
from soloist.bench.prepare import Server, prepare, prepare_server
from soloist.bench.recording import record_events
from soloist.bench.records import Condition, RunFile, Variant, Workload
from soloist.bench.run import run, run_card
from soloist.bench.table import run_lines
from soloist.bench.target import Event, Prompt
from soloist.bench.texts import ELSEWHERE, regret
from soloist.cli import main
from soloist.errors import UserError
from soloist.runtime import traffic
from soloist.runtime.runner import EagerRunner
from soloist.testing import configs
from soloist.testing.checkpoints import write_checkpoint
from soloist.weights.shapes import CONFIGS
from tests.bench_runs import CARD, MACHINE, Clockwork, clockwork_bench, record
from tests.llms import GREEDY, PROMPT, fresh, shared
from tests.test_cli_main import parser_of


@pytest.fixture(scope="module", autouse=True)
def small_probe() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(traffic.PROBE_BYTES, "cpu", 1 << 22)
        yield


def kinds(found: RunFile) -> set[str]:
    return {flag.kind for flag in found.flags}


def test_variants_take_turns_on_every_prompt(tmp_path: Path) -> None:
    a, b = Clockwork(10.0), Clockwork(5.0)
    found = run(clockwork_bench(a, b, card=dataclasses.replace(CARD, repeats=2)), tmp_path / "x.json")
    assert [(r.variant, r.prompt, r.repeat) for r in found.requests] == [
        (variant, prompt, repeat) for repeat in range(2) for prompt in range(8) for variant in ("plain", "other")
    ]
    (verdict,) = found.verdicts
    assert verdict.speedup == pytest.approx(2.0) and verdict.conclusion == "faster" and found.passed
    assert found.card.workloads[0].prompts_sha256 and found.card_hash == found.card.hash()
    assert read_run(tmp_path / "x.json") == found


def test_warm_up_prompts_are_not_measured_ones(tmp_path: Path) -> None:
    targets = Clockwork(10.0), Clockwork(5.0)
    found = run(clockwork_bench(*targets, card=dataclasses.replace(CARD, warm_up=2)), tmp_path / "x.json")
    for target in targets:
        warm, measured = target.served[:2], target.served[2:10]
        assert not set(warm) & set(measured)
    assert "cold" not in kinds(found)
    cold = run(clockwork_bench(*targets, card=dataclasses.replace(CARD, warm_up=0)), tmp_path / "y.json")
    assert "cold" in kinds(cold)


def test_a_run_whose_text_differs_has_failed(tmp_path: Path) -> None:
    found = run(clockwork_bench(Clockwork(10.0), Clockwork(1.0, wrong_after=9)), tmp_path / "x.json")
    assert not found.passed and found.verdicts[0].speedup is None and "text differs" in kinds(found)
    assert {(r.text_same, r.first_difference) for r in found.requests if r.variant == "other"} == {(False, 9)}
    shown = "\n".join(run_lines(found))
    assert "DIFFERS" in shown and "FAILED" in shown and "none" in shown


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    stopped = Clockwork(5.0)
    stopped.interrupt_at = 4
    found = run(clockwork_bench(Clockwork(10.0), stopped), tmp_path / "x.json")
    assert found.partial and len(found.requests) == 7 and "partial" in kinds(found)
    kept = read_run(tmp_path / "x.json")
    assert kept == found and len(kept.requests[0].blocks) == 16
    assert "PARTIAL" in "\n".join(run_lines(kept))


class Refusing(Clockwork):
    """Its fourth measured request is refused."""

    def serve(self, prompt: Prompt, sampling: Mapping[str, Any]) -> Iterator[Event]:
        if len(self.served) == 4:
            raise UserError("no room")
        yield from super().serve(prompt, sampling)


def test_a_refusal_on_the_way_keeps_what_was_measured(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no room; the 7 requests measured before are in .*x.json"):
        run(clockwork_bench(Clockwork(10.0), Refusing(5.0)), tmp_path / "x.json")
    kept = read_run(tmp_path / "x.json")
    assert kept.partial and len(kept.requests) == 7 and all(len(r.blocks) == 16 for r in kept.requests)


class Killed(BaseException):
    """Stands for what lets a process write nothing more."""


def test_a_killed_run_loses_only_the_request_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary was written once, after the first request; the rest is read from the rounds, where half a line is no line."""
    stopped, writes = Clockwork(5.0), list[int]()

    def write_once(self: RunFile, path: Path) -> None:
        writes.append(len(self.requests))
        if len(writes) > 1:
            raise Killed
        original(self, path)

    original = RunFile.write
    stopped.interrupt_at = 6
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RunFile, "write", write_once)
        run(clockwork_bench(Clockwork(10.0), stopped), tmp_path / "x.json")
    assert writes == [1, 11] and len(json.loads((tmp_path / "x.json").read_text())["requests"]) == 1
    with rounds_path(tmp_path / "x.json").open("a") as rounds:
        rounds.write('{"request":11,"t_ms":5')
    kept = read_run(tmp_path / "x.json")
    assert kept.partial and len(kept.requests) == 11 and all(len(r.blocks) == 16 for r in kept.requests)
    assert [s.requests for s in kept.summaries] == [6, 5] and "11 requests were measured" in {f.detail for f in kept.flags}
    assert [check.detail for check in kept.checks] == ["6 of 6 answers", "5 of 5 answers"]
    whole = run(clockwork_bench(Clockwork(10.0), Clockwork(5.0)), tmp_path / "y.json")
    assert [dataclasses.replace(r, at_s=0.0) for r in kept.requests] == [
        dataclasses.replace(r, at_s=0.0) for r in whole.requests[:11]
    ]


def test_a_run_that_measures_nothing_leaves_the_one_before(tmp_path: Path) -> None:
    before = run(clockwork_bench(Clockwork(10.0), Clockwork(5.0)), tmp_path / "x.json")
    stopped = Clockwork(5.0)
    stopped.interrupt_at = 0
    with pytest.raises(KeyboardInterrupt):
        run(clockwork_bench(stopped, Clockwork(5.0)), tmp_path / "x.json")
    assert read_run(tmp_path / "x.json") == before and sorted(p.name for p in tmp_path.iterdir()) == ["x.json", "x.rounds.jsonl"]


def test_ctrl_c_before_the_first_measurement_ends_the_command(tmp_path: Path) -> None:
    stopped = Clockwork(5.0)
    stopped.interrupt_at = 0
    with pytest.raises(KeyboardInterrupt):
        run(clockwork_bench(stopped, Clockwork(5.0)), tmp_path / "x.json")


def test_time_ends_a_run_that_is_given_seconds(tmp_path: Path) -> None:
    found = run(clockwork_bench(Clockwork(1.0), Clockwork(1.0), card=dataclasses.replace(CARD, seconds=0.2)), tmp_path / "x.json")
    assert not found.partial and max(r.repeat for r in found.requests) > 0


def flagged(*requests: object, card: object = CARD, conditions: tuple[Condition, ...] = (), **machine: object) -> set[str]:
    there = dataclasses.replace(MACHINE, **machine)  # type: ignore[arg-type]
    return {f.kind for f in find_flags(card, there, conditions, requests, (), False, True)}  # type: ignore[arg-type]


def condition(clock: float = 1900.0, throttle: tuple[str, ...] = (), busy: tuple[str, ...] = ()) -> Condition:
    return Condition(0.0, 0.1, busy, (clock,), (), (), (), throttle)


def test_what_spoils_a_number_flags_the_run() -> None:
    assert flagged(*map(record, range(8))) == set()
    assert flagged(record(cached_tokens=3)) == {"prefix hit"}
    warm = dataclasses.replace(CARD, workloads=(dataclasses.replace(CARD.workloads[0], cache="warm"),))
    assert flagged(record(cached_tokens=3), card=warm) == set()
    assert flagged(record(compiled=2)) == {"compiled"}
    assert flagged(record(output_tokens=None)) == {"no count"}
    assert flagged(record(output_tokens=9)) == {"ended early"}
    assert flagged(record(error="broke off")) == {"failed requests"}
    assert flagged(dirty=True) == {"uncommitted changes"}
    assert flagged(*(record(0, k, ms) for k, ms in enumerate((20.0, 10, 10, 10)))) == {"cold", "scatter"}
    assert flagged(*(record(0, k, ms) for k, ms in enumerate((10.2, 10, 10, 10)))) == set()
    assert flagged(conditions=tuple(map(condition, (300.0, 1900, 1700, 300)))) == {"clocks changed"}
    assert flagged(conditions=tuple(map(condition, (300.0, 1900, 1890, 300)))) == set()
    assert flagged(conditions=(condition(throttle=("power cap",)),)) == {"throttled"}
    assert flagged(conditions=(dataclasses.replace(condition(), clock_mhz=()),)) == {"clocks unknown"}
    assert flagged(conditions=(condition(busy=("cc1 (pid 7)",)),)) == {"busy machine"}
    shared = dataclasses.replace(condition(), other_cores=0.4)
    assert flagged(conditions=(condition(), shared)) == {"busy machine"} and flagged(conditions=(shared, condition())) == set()
    pinned = Variant("p", "scripted", 3, "pinned", 2.0)
    assert flagged(card=dataclasses.replace(CARD, variants=(pinned,))) == {"synthetic acceptance"}
    assert flagged(card=dataclasses.replace(CARD, model="shapes:qwen3-4b")) == {"random weights"}


@pytest.mark.parametrize("mean", [1.0, 1.7, 2.5, 4.0])
def test_a_script_pins_the_acceptance_length(mean: float) -> None:
    lengths = round_lengths(300, mean)
    assert sum(lengths) == 300 and set(lengths[:-1]) <= {int(mean), int(mean) + 1}
    assert sum(lengths) / len(lengths) == pytest.approx(mean, rel=0.01)
    text = list(range(5, 25))
    assert pinned_script(text, 3, 4.0, 50) == text
    assert pinned_script(text, 3, 1.0, 50) == [5, *(t + 1 for t in text[1:-1]), text[-1]]


SMALL = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "expert_swiglu_limit_list": None,
         "share_expert_swiglu_limit_list": None}  # fmt: skip
"""Of ling-mtp: a layer of every kind."""
TABLE = {
    "name": "tiny", "settings": {"context_length": 64, "device": "cpu", "dtype": "float32"},
    "workloads": [{"name": "random", "prompts": "random", "input_tokens": 8, "num_prompts": 2, "output_tokens": 10},
                  {"name": "warm", "prompts": "tiled", "input_tokens": 40, "num_prompts": 1, "output_tokens": 6,
                   "temperature": 1.0}],
    "variants": [{"name": "plain"}, {"name": "n-gram", "drafter": "ngram"}, {"name": "NEXTN", "drafter": "mtp", "draft_width": 2},
                 {"name": "pinned", "drafter": "scripted", "draft_width": 3, "acceptance": "pinned", "accept_length": 3.0}],
}  # fmt: skip


@pytest.fixture(scope="module")
def real() -> RunFile:
    """A tiny random checkpoint with every kind of variant."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(f"{folder}/model", "ling-mtp", **SMALL)
        card = card_of({**TABLE, "model": f"{folder}/model"}, "tiny")
        return run_card(card, Path(folder) / "x.json")


def test_real_drafters_write_the_plain_text_at_any_temperature(real: RunFile) -> None:
    assert real.passed and all(r.text_same and r.token_ids_sha256 for r in real.requests)
    assert len(real.requests) == 3 * 4 and not real.partial
    names = {check.name for check in real.checks}
    assert names == {
        "text is that of plain decoding", "greedy text is the same after sampled requests", "logits are finite"
    }  # fmt: skip


def test_pinned_acceptance_has_its_length_and_is_called_synthetic(real: RunFile) -> None:
    pinned = next(s for s in real.summaries if (s.variant, s.workload) == ("pinned", "random"))
    assert pinned.ratios["acceptance_length"].value == pytest.approx(3.0, abs=0.15) and pinned.synthetic
    assert pinned.accepted_at[0] == pinned.tried_at[0] and pinned.accepted_at[1] == pinned.tried_at[1]
    assert "synthetic acceptance" in kinds(real) and "pinned (synthetic)" in "\n".join(run_lines(real))


def test_a_run_holds_what_it_stands_on(real: RunFile) -> None:
    assert real.card.weights.startswith("sha256:") and real.card.tokenizer == "none"
    assert set(real.plans) == {"plain", "n-gram", "NEXTN", "pinned"} and real.plans["NEXTN"]["draft_width"] == 2
    assert "model" not in real.plans["plain"]
    assert real.ops["cpu"] and real.read_rate and real.machine.cpu and len(real.conditions) >= 3
    plain = next(s for s in real.summaries if (s.variant, s.workload) == ("plain", "random"))
    assert plain.share_of_limit and plain.ratios["acceptance_length"].value == 1.0
    (each,) = plain.round_bytes
    assert each.width == 0 and each.experts == 4 and each.position_bytes > 0
    assert all(gap >= 0 for r in real.requests for gap in (r.end_ms, r.ttft_ms or 0))


def test_drafted_rounds_have_a_share_of_the_limit_too(real: RunFile) -> None:
    """By the bytes counted in a round of each width: more than a plain round's, and less than as many as it has rows."""
    found = {s.variant: s for s in real.summaries if s.workload == "random"}
    (plain,) = found["plain"].round_bytes
    for name in ("NEXTN", "pinned"):
        widest = found[name].round_bytes[-1]
        assert found[name].share_of_limit and widest.experts and widest.experts > plain.experts
        assert plain.fixed_bytes < widest.fixed_bytes < (widest.width + 1) * plain.fixed_bytes
    assert found["pinned"].round_bytes[-1].position_bytes == plain.position_bytes < found["NEXTN"].round_bytes[-1].position_bytes


def test_the_reference_runs_on_shapes_with_variants_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a GPU, with a smaller model: nothing but lengths and the model's name differs."""
    monkeypatch.setitem(CONFIGS, "small", {**configs.CONFIGS["ling-mtp"], **SMALL, "torch_dtype": "bfloat16"})
    words = (
        "bench run reference --set model=shapes:small --set num_prompts=1 --set input_tokens=64 --set output_tokens=14 "
        f"--set context_length=96 --set warm_up=1 --workload random --add 3.25:accept_length=3.25,draft_width=7 "
        f"--add 5:accept_length=5,draft_width=7 --output {tmp_path}/x.json"
    )
    assert main(words.split()) == 0
    assert "random weights" in capsys.readouterr().out
    found = read_run(tmp_path / "x.json")
    assert found.passed and {w.name for w in found.card.workloads} == {"random"} and len(found.requests) == 3
    assert found.card.weights.startswith("random weights") and found.card.tokenizer == "none"
    lengths = {s.variant: s.ratios["acceptance_length"].value for s in found.summaries}
    assert lengths["3.25"] == pytest.approx(3.25) and lengths["5"] == pytest.approx(13 / 3)
    assert {s.variant for s in found.summaries if s.synthetic} == {"3.25", "5"} and lengths["plain"] == 1


class Preparing(EagerRunner):
    """Rounds as they are, of which the first three count as prepared, as where rounds are captured."""

    launched = 0

    @property
    def num_prepared(self) -> int:  # type: ignore[override]
        return min(self.launched, 3)

    def launch(self, *args: Any, **kwargs: Any) -> None:
        self.launched += 1
        super().launch(*args, **kwargs)


def test_rounds_that_a_request_must_prepare_are_counted() -> None:
    llm = fresh("llama")
    llm._engine.runner = Preparing(llm._engine.parts)
    target, prompt, sampling = InProcess(llm), Prompt("p", "", tuple(PROMPT)), {"temperature": 0.0, "max_tokens": 9}
    first, second = (record_events(target.serve(prompt, sampling), ELSEWHERE).record for _ in range(2))
    assert (first.compiled, second.compiled) == (3, 0)


def test_the_drafter_that_auto_stands_for_is_hashed(tmp_path: Path) -> None:
    table = {**TABLE, "model": "nano", "variants": [{"name": n, "drafter": n} for n in ("none", "auto", "dspark", "mtp")]}
    bench = prepare(card_of({**table, "settings": {"context_length": 64}}, "x"), tmp_path)
    bench.close()
    none, auto, dspark, mtp = (variant.drafter_weights for variant in bench.card.variants)
    assert auto == dspark and dspark.startswith("sha256:") and none == mtp == ""


def test_regret_is_nothing_for_our_own_greedy_text_and_large_for_another() -> None:
    llm = shared("llama")
    ids = llm.generate(PROMPT, GREEDY).token_ids
    assert regret(llm, PROMPT, ids) == 0
    assert regret(llm, PROMPT, [*ids[:4], (ids[4] + 1) % 90, *ids[5:]]) > 0.01


def test_a_server_runs_one_variant_that_the_card_knows() -> None:
    card = dataclasses.replace(CARD, workloads=(Workload("w", "random", 1, 1, 4),))
    with pytest.raises(UserError, match="say which it was started with"):
        prepare_server(card, Server("http://127.0.0.1:9"))
    with pytest.raises(UserError, match="the card has plain, other"):
        prepare_server(card, Server("http://127.0.0.1:9", "third"))
    with pytest.raises(UserError, match="no server answers"):
        prepare_server(card, Server("http://127.0.0.1:9", "plain"))


FLAGS = {
    "run": "--add --api-key --help --json --output --reference --served-model --set --url --variant --workload -h".split(),
    "compare": "--help --json --subject --tolerance -h".split(),
    "report": "--help --html --markdown --png -h".split(),
}


@pytest.mark.parametrize("what", FLAGS)
def test_flags_of_bench_are_frozen(what: str) -> None:
    kinds = next(action for action in parser_of("bench")._actions if action.dest == "what")
    assert sorted(kinds.choices[what]._option_string_actions) == FLAGS[what]  # type: ignore[index]


@pytest.mark.parametrize("line, said", [
    ("bench", "required"), ("bench walk", "invalid choice"), ("bench run", "required"), ("bench run demon", "presets are"),
    ("bench run demo --set repeets=3", "did you mean repeats"), ("bench run demo --variant X", "the card has plain"),
    ("bench run demo --workload X", "the card has six manners"), ("bench run demo --add X", "must be NAME:KEY=VALUE"),
    ("bench run demo --reference nano", "give its --url"), ("bench run demo --output /no/x.json", "no folder"),
    ("bench run demo --output tests", "is a folder"), ("bench run demo --output /proc/x.json", "/proc"),
    ("bench run demo --url http://h --variant a --variant b", "one way"), ("bench compare a.json", "required"),
    ("bench compare /no/a.json /no/b.json", "cannot be read"), ("bench report /no/a.json", "cannot be read"),
    ("bench run demo --set model=/nowhere", "/nowhere"),
])  # fmt: skip
def test_a_mistake_is_one_line_and_code_2(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and said in shown.err


def test_the_command_writes_and_prints_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "model", "llama")
    (tmp_path / "card.toml").write_text(
        f'model = "{tmp_path}/model"\n[settings]\ncontext_length = 64\n[[workloads]]\nname = "w"\nprompts = "random"\n'
        'input_tokens = 5\nnum_prompts = 2\noutput_tokens = 4\n[[variants]]\nname = "plain"\n'
    )
    words = ["bench", "run", str(tmp_path / "card.toml"), "--output", str(tmp_path / "out.json")]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["card"]["name"] == "card"
    assert main(words) == 0 and "same" in capsys.readouterr().out
    assert read_run(tmp_path / "out.json").passed


def test_the_readme_shows_the_demo_as_it_was_measured() -> None:
    root = Path(__file__).parents[1]
    measured = read_run(root / "benchmarks" / "runs" / "demo-cpu.json")
    assert "\n".join(run_lines(measured)) in (root / "README.md").read_text()
    assert measured.passed and not measured.partial and not measured.flags and measured.duration_s < 90
