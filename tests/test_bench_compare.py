"""Comparing runs: a planted slowdown is found, chance is not, unlike runs are refused, a wrong text has no speed-up."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from soloist.bench.compare import compare, differences
from soloist.bench.records import Flag, RunFile
from soloist.bench.summarise import judge, summarise, verdicts_of
from soloist.bench.table import comparison_lines
from soloist.cli import main
from soloist.errors import UserError
from tests.bench_runs import CARD, MACHINE, noisy_requests, noisy_run, record, run_of


def tpot(a: RunFile, b: RunFile, **how: float) -> set[str]:
    return {v.conclusion for v in compare(a, b, **how).verdicts if v.metric == "tpot_ms"}  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(5))
def test_a_planted_slowdown_of_five_percent_is_found(seed: int) -> None:
    found = compare(noisy_run(seed), noisy_run(seed + 100, factor=1.05))
    assert {v.conclusion for v in found.verdicts if v.metric == "tpot_ms"} == {"slower"} and found.code == 1
    verdict = found.verdicts[0]
    assert verdict.low is not None and verdict.high is not None and verdict.low < 1 / 1.05 < verdict.high
    assert tpot(noisy_run(seed), noisy_run(seed + 100, factor=0.95)) == {"faster"}


@pytest.mark.parametrize("seed", range(5))
def test_two_like_runs_overlap(seed: int) -> None:
    a, b = noisy_run(seed), noisy_run(seed + 100)
    assert compare(a, b).code == 0 and tpot(a, b) == {"no difference found"}
    for x, y in zip(a.summaries, b.summaries, strict=True):
        first, second = x.distributions["tpot_ms"], y.distributions["tpot_ms"]
        assert None not in (first.low, first.high, second.low, second.high)
        assert first.low < second.high and second.low < first.high  # type: ignore[operator]


def test_chance_is_seldom_called_a_difference() -> None:
    calls = [judge(*(noisy_requests(seed + k)[::2] for k in (0, 1000))) for seed in range(100)]
    assert sum(v.conclusion != "no difference found" for v in calls) <= 10


def test_a_difference_within_the_tolerance_does_not_count() -> None:
    assert tpot(noisy_run(1), noisy_run(2, factor=1.05), tolerance=0.1) == {"no difference found"}
    with pytest.raises(UserError, match="tolerance=2"):
        compare(noisy_run(1), noisy_run(2), tolerance=2)


def test_few_pairs_give_no_verdict() -> None:
    few = judge([record(i) for i in range(5)], [record(i, tpot_ms=20) for i in range(5)])
    assert few.conclusion.startswith("too few pairs") and few.speedup == pytest.approx(0.5) and few.low is None
    assert judge([record(i) for i in range(6)], [record(i, tpot_ms=20) for i in range(6)]).conclusion == "slower"


def test_pairs_of_one_prompt_count_once() -> None:
    """Speed-ups that differ from prompt to prompt are not made certain by repeating each prompt."""
    def repeated(times: int, factor: float) -> list:
        return [record(p, r, 10 * (factor if p % 2 else 1 / factor)) for r in range(times) for p in range(6)]

    once, often = (judge([record(p, r) for r in range(n) for p in range(6)], repeated(n, 1.2)) for n in (1, 50))
    assert (once.low, once.high, once.pairs) == (pytest.approx(often.low), pytest.approx(often.high), often.pairs)


def test_a_drift_between_runs_is_not_called_a_difference() -> None:
    """Every prompt was slower in three repeats of six: by prompts the difference looks certain, by time it is not."""
    steady = [record(p, r) for r in range(6) for p in range(8)]
    disturbed = [record(p, r, 14.0 if r < 3 else 9.0) for r in range(6) for p in range(8)]
    assert judge(steady, disturbed).conclusion == "no difference found"
    assert judge(steady, [record(p, r, 11.0) for r in range(6) for p in range(8)]).conclusion == "slower"


def test_runs_on_a_restless_machine_are_called_so() -> None:
    noisy = dataclasses.replace(noisy_run(2), flags=(Flag("scatter", "plain on chat 19%"),))
    assert compare(noisy_run(1), noisy).restless == ("scatter",) and compare(noisy_run(1), noisy_run(2)).restless == ()
    assert any("NOT QUIET (scatter)" in line for line in comparison_lines(compare(noisy_run(1), noisy)))


def test_a_wrong_text_has_no_speedup() -> None:
    fast = [record(i, tpot_ms=5.0, variant="other") for i in range(8)]
    wrong = [*fast[:-1], dataclasses.replace(fast[-1], text_same=False)]
    plain = [record(i) for i in range(8)]
    assert judge(plain, fast).conclusion == "faster"
    for bad in (wrong, [*fast[:-1], dataclasses.replace(fast[-1], error="broke off")]):
        found = judge(plain, bad)
        assert found.speedup is None and found.low is None and found.conclusion.startswith("failed")
        assert verdicts_of(CARD, [*plain, *bad])[0] == found
    failed = dataclasses.replace(noisy_run(2), passed=False)
    assert compare(noisy_run(1), failed).code == 1


def test_failed_requests_are_counted_and_left_out() -> None:
    found = summarise([record(0), record(1, tpot_ms=99.0, error="broke off")], CARD.variants[0])
    assert (found.requests, found.failed, found.distributions["tpot_ms"].max) == (2, 1, pytest.approx(10))


def test_unlike_runs_are_refused_and_the_fields_named() -> None:
    workload = dataclasses.replace(CARD.workloads[0], output_tokens=32)
    other = dataclasses.replace(CARD, workloads=(workload,), seed=3)
    machine = dataclasses.replace(MACHINE, commit="def", versions={"torch": "2.14.0"})
    a, b = noisy_run(1), noisy_run(2, card=other, machine=machine)
    assert set(differences(a, b)) == {"workloads.chat.output_tokens", "seed", "machine.commit", "machine.versions.torch"}
    with pytest.raises(UserError, match="workloads.chat.output_tokens: 16 / 32.*--subject machine.versions.torch"):
        compare(a, b, ["machine.commit", "seed"])
    assert compare(a, b, ["workloads", "seed", "machine"]).code == 0
    assert compare(a, b, ["workloads", "seed", "commit", "versions"]).code == 0


def test_servers_of_two_engines_are_no_repetition() -> None:
    card = dataclasses.replace(CARD, target="http")
    a, b = (noisy_run(seed, card=card, plans={"plain": {"owned_by": owner}}) for seed, owner in ((1, "vllm"), (2, "sglang")))
    with pytest.raises(UserError, match="server.owned_by: vllm / sglang"):
        compare(a, b)
    assert compare(a, b, ["server"]).subjects == {"server.owned_by": ("vllm", "sglang")}
    assert compare(a, dataclasses.replace(b, plans=a.plans)).code == 0


def test_single_variants_are_compared_whatever_their_names() -> None:
    """Two runs of one variant each, as two servers give: the drafter is the subject."""
    def single(name: str, drafter: str) -> RunFile:
        variant = dataclasses.replace(CARD.variants[0], name=name, drafter=drafter)
        return run_of(tuple(record(p, variant=name) for p in range(8)), dataclasses.replace(CARD, variants=(variant,)))

    found = compare(single("a", "mtp"), single("b", "ngram"), ["variants"])
    assert {(v.baseline, v.variant) for v in found.verdicts} == {("a", "b")}
    found = compare(single("a", "mtp"), single("a", "ngram"), ["drafter"])
    assert set(found.subjects) == {"variants.a.drafter"}


def test_a_subject_that_does_not_differ_is_a_mistake() -> None:
    changed = noisy_run(2, machine=dataclasses.replace(MACHINE, commit="def"))
    assert compare(noisy_run(1), changed, ["machine.commit"]).subjects == {"machine.commit": ("abc", "def")}
    with pytest.raises(UserError, match="did you mean machine.commit"):
        compare(noisy_run(1), changed, ["machine.comit"])
    with pytest.raises(UserError, match="different are no fields"):
        compare(noisy_run(1), noisy_run(2), ["drafter"])


def test_the_name_of_a_card_is_a_label() -> None:
    assert compare(noisy_run(1), noisy_run(2, card=dataclasses.replace(CARD, name="else"))).code == 0


def test_runs_with_nothing_measured_are_refused() -> None:
    with pytest.raises(UserError, match="no variant and workload"):
        compare(run_of(()), run_of(()))


def test_the_command_prints_the_verdict_and_exits_for_ci(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = (str(tmp_path / f"{name}.json") for name in "abc")
    for path, run in ((a, noisy_run(1)), (b, noisy_run(2, factor=1.05)), (c, noisy_run(3))):
        run.write(Path(path))
    assert main(["bench", "compare", a, c]) == 0 and "no difference found" in capsys.readouterr().out
    assert main(["bench", "compare", a, b]) == 1 and "slower" in capsys.readouterr().out
    assert main(["bench", "compare", a, b, "--tolerance", "0.2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tolerance"] == 0.2
    other = dataclasses.replace(noisy_run(4), card=dataclasses.replace(CARD, seed=9))
    other.write(Path(b))
    assert main(["bench", "compare", a, b]) == 2 and "seed: 0 / 9" in capsys.readouterr().err
    assert any("subject: seed: 0 -> 9" in line for line in comparison_lines(compare(noisy_run(1), other, ["seed"])))
