"""Run a card: prepare, warm up, measure the variants in turn (ABAB...), check the texts, sum up.

Every request and its rounds go to the JSONL file when it ends, and the JSON file is written again every minute, so whatever
ends the run early leaves files that say `partial` and hold what was measured.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

import soloist
from soloist.bench.card import sampling_params
from soloist.bench.conclude import conclude
from soloist.bench.files import Journal
from soloist.bench.flags import prompt_flags
from soloist.bench.inprocess import InProcess
from soloist.bench.limit import counted_bytes, memory_rate, plain_bytes
from soloist.bench.machine import Conditions
from soloist.bench.prepare import Bench, Server, prepare, prepare_server
from soloist.bench.recording import Place, record_events
from soloist.bench.records import (
    SCHEMA_VERSION,
    Card,
    Check,
    Condition,
    Flag,
    RequestRecord,
    RoundBytes,
    RunFile,
    Variant,
    Workload,
)
from soloist.bench.texts import Reference, finite_logits, greedy_after_sampled
from soloist.errors import UserError
from soloist.ops.op import chosen_ops

SAVE_S, SAVE_SHARE = 60.0, 0.02
"""Seconds from one save to the next, and the share of the time that saving may take in a long run."""


@dataclass
class Results:
    """What a running benchmark has so far."""

    requests: list[RequestRecord] = field(default_factory=list)
    conditions: list[Condition] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    flags: list[Flag] = field(default_factory=list)
    moved: dict[tuple[str, str], tuple[RoundBytes, ...]] = field(default_factory=dict)


def run(bench: Bench, output: Path, command: str = "", progress: bool = False) -> RunFile:
    """Run it all and write `output`, and the rounds beside it. Ctrl+C ends the measuring and keeps what there is.

    Raises: KeyboardInterrupt if nothing was measured yet; UserError for what a target refuses on the way, which keeps what
    was measured too.
    """
    started, begun = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), time.perf_counter()
    results = Results()
    read_rate = memory_rate(bench.model) if bench.model is not None else None

    def result(partial: bool) -> RunFile:
        return _run_file(bench, results, command, started, time.perf_counter() - begun, read_rate, partial)

    with Conditions(bench.gpus) as conditions, closing(Journal(output)) as journal:
        results.conditions.append(conditions.read())
        ended = False
        try:
            _warm_up(bench, results, progress)
            measured_s, next_save = conditions.now_s, 0.0
            for record in _measure(bench, conditions, results, progress):
                results.requests.append(record)
                journal.add(record)
                if (now := time.perf_counter()) > next_save:
                    result(True).write(output)
                    next_save = time.perf_counter() + max(SAVE_S, (time.perf_counter() - now) / SAVE_SHARE)
            results.conditions += [*conditions.extremes(measured_s, conditions.now_s), conditions.read()]
            results.checks += _gates(bench)
            results.moved |= _counted(bench, results)
            ended = True
        except KeyboardInterrupt:
            if not results.requests:
                raise
        except UserError as error:
            kept = f"; the {len(results.requests)} requests measured before are in {output}" if results.requests else ""
            raise UserError(f"{error}{kept}") from error
        finally:
            if results.requests or ended:
                results.conditions.append(conditions.read())
                done = result(not ended)
                done.write(output)
    return done


def _warm_up(bench: Bench, results: Results, progress: bool) -> None:
    """What is known before anything is measured, and the requests that nobody measures."""
    for workload in bench.card.workloads:
        results.flags += prompt_flags(workload.name, bench.prompts[workload.name][: workload.num_prompts])
        for variant, target in _in_process(bench):
            if variant.acceptance == "off":
                results.moved[variant.name, workload.name] = (plain_bytes(target.llm),)
    steps = list(_warm_ups(bench.card))
    for workload, variant, index in tqdm(steps, "warm-up", disable=None if progress else True, leave=False):
        sampling = sampling_params(workload, bench.card.seed)
        record_events(
            bench.targets[variant.name].serve(bench.prompts[workload.name][index], sampling),
            Place(variant.name, workload.name, "", index, 0, 0.0),
        )


def _warm_ups(card: Card) -> Iterator[tuple[Workload, Variant, int]]:
    for workload in card.workloads:
        for index in range(workload.num_prompts, workload.num_prompts + card.warm_up):
            for variant in card.variants:
                yield workload, variant, index


def _order(card: Card) -> Iterator[tuple[Workload, int, int, Variant]]:
    """Workload, repeat, prompt, and innermost the variant: ABAB. By time the repeats never end."""
    repeats = itertools.count() if card.seconds is not None else range(card.repeats)
    rounds = ((w, repeat) for repeat in repeats for w in card.workloads) if card.seconds is not None else (
        (w, repeat) for w in card.workloads for repeat in repeats
    )  # fmt: skip
    for workload, repeat in rounds:
        for prompt in range(workload.num_prompts):
            for variant in card.variants:
                yield workload, repeat, prompt, variant


def _measure(bench: Bench, conditions: Conditions, results: Results, progress: bool) -> Iterator[RequestRecord]:
    """The measured requests, one after another."""
    card, reference = bench.card, Reference(bench.reference)
    total = sum(w.num_prompts for w in card.workloads) * len(card.variants) * card.repeats
    timed = {"total": total, "unit": "request"}
    if card.seconds is not None:
        timed = {"total": round(card.seconds), "unit": "s"}
    begin_s, last = conditions.now_s, None
    with tqdm(desc="measuring", disable=None if progress else True, **timed) as bar:
        for workload, repeat, index, variant in _order(card):
            at_s = conditions.now_s - begin_s
            if card.seconds is not None and at_s >= card.seconds:
                return
            if last not in (None, workload.name):
                results.conditions.append(conditions.read())
            last = workload.name
            prompt, target = bench.prompts[workload.name][index], bench.targets[variant.name]
            sampling = sampling_params(workload, card.seed + index)
            sent = conditions.mark()
            place = Place(variant.name, workload.name, workload.domain or prompt.domain, index, repeat, at_s)
            answer = record_events(target.serve(prompt, sampling), place)
            energy = conditions.energy_since(sent)
            record = reference.judge(answer, variant, target, prompt, sampling)
            bar.set_postfix_str(f"{variant.name} on {workload.name}", refresh=False)
            bar.update(1 if card.seconds is None else conditions.now_s - begin_s - bar.n)
            yield dataclasses.replace(record, energy_j=energy)


def _gates(bench: Bench) -> list[Check]:
    """Correctness that needs requests of its own, on the first workload's first prompt."""
    workload = bench.card.workloads[0]
    prompt, found = bench.prompts[workload.name][0], []
    sampling = sampling_params(workload, bench.card.seed)
    for variant in bench.card.variants:
        target = bench.targets[variant.name]
        if not variant.synthetic:
            found.append(greedy_after_sampled(target, variant, workload, prompt, sampling))
        if isinstance(target, InProcess) and variant.acceptance == "off":
            found.append(finite_logits(target.llm, variant, workload, prompt))
    return found


def _in_process(bench: Bench) -> Iterator[tuple[Variant, InProcess]]:
    for variant in bench.card.variants:
        target = bench.targets[variant.name]
        if isinstance(target, InProcess):
            yield variant, target


def _counted(bench: Bench, results: Results) -> dict[tuple[str, str], tuple[RoundBytes, ...]]:
    """What the rounds of every workload and variant moved, where shapes do not say it."""
    found = {}
    for workload in bench.card.workloads:
        prompt, sampling = bench.prompts[workload.name][0], sampling_params(workload, bench.card.seed)
        for variant, target in _in_process(bench):
            if variant.acceptance != "off":
                own = [r for r in results.requests if (r.variant, r.workload) == (variant.name, workload.name)]
                found[variant.name, workload.name] = counted_bytes(target, prompt, sampling, own)
    return found


def _run_file(
    bench: Bench, results: Results, command: str, started: str, duration_s: float, read_rate: float | None, partial: bool
) -> RunFile:
    found = RunFile(
        schema_version=SCHEMA_VERSION,
        soloist=soloist.__version__,
        card=bench.card,
        card_hash=bench.card.hash(),
        command=command,
        started=started,
        duration_s=duration_s,
        machine=bench.machine,
        conditions=tuple(results.conditions),
        plans={name: target.plan() for name, target in bench.targets.items()},
        ops=chosen_ops() if bench.model is not None else {},
        read_rate=read_rate,
        requests=tuple(results.requests),
        summaries=(),
        verdicts=(),
        checks=tuple(results.checks),
        flags=tuple(results.flags),
        partial=partial,
        passed=True,
    )
    return conclude(found, results.moved)


def run_card(
    card: Card, output: Path, command: str = "", progress: bool = False, server: Server | None = None
) -> RunFile:
    """Run a card in this process, or on a server.   Raises: UserError for what cannot be had."""
    with tempfile.TemporaryDirectory() as folder:
        bench = prepare(card, Path(folder), progress) if server is None else prepare_server(card, server, progress)
        try:
            return run(bench, output, command, progress)
        finally:
            bench.close()
