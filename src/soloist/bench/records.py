"""What a benchmark run leaves behind: the schema of its JSON file, version SCHEMA_VERSION.

A RunFile is one JSON object whose keys are the fields below, read back strictly: an unknown or missing key is an error.
The blocks of its requests are not in it but in a JSONL file beside it, one round a line, see `files.py`. Everything but
the time line of a request can be had without that file. Times are milliseconds on a monotonic clock, sizes are bytes.
None means "not known", never zero. What a number means is written in `metrics.py`; this file says what was observed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 2
READABLE = (1, 2)
"""Versions that can be read: in 1 the machine and its conditions had fewer fields."""

UNKNOWN = "unknown"
"""Hash of weights or of a tokenizer that only a server has."""

ACCEPTANCES = ("real", "pinned", "off")
"""Where accepted tokens come from: the drafter's own skill; a script with a wanted mean length, which is synthetic and
says nothing of any drafter; nowhere, plain decoding."""


# ---- the card: what was asked for ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """One kind of request. Every prompt of it is sent with the same lengths and sampling.

    prompts: the family, see `prompts.py` (`set:code`, `tiled`, `random`, ...). prompts_sha256: of the token ids that
    were sent, in order (of the texts where a foreign server tokenises). input_tokens: wanted length, None = as the
    prompts are. output_tokens: most tokens to generate; with ignore_eos exactly that many. sampling: SamplingParams
    fields beside max_tokens and ignore_eos; without a temperature it is greedy. cache: `cold`, no token of a measured
    prompt may come from a prefix cache; `warm`, it may.
    """

    name: str
    prompts: str
    num_prompts: int
    output_tokens: int
    input_tokens: int | None = None
    ignore_eos: bool = True
    sampling: dict[str, Any] = field(default_factory=dict)
    cache: str = "cold"
    prompts_sha256: str = ""
    domain: str = ""

    @property
    def temperature(self) -> float:
        return float(self.sampling.get("temperature", 0.0))


@dataclass(frozen=True)
class Variant:
    """One way to run: what differs between the columns of the table. The first variant of a card is the baseline.

    settings: further fields of EngineConfig. acceptance: one of ACCEPTANCES. accept_length: the wanted mean number of
    tokens a round where acceptance is pinned. drafter_weights: hash of a drafter's own files, empty without any.
    """

    name: str
    drafter: str = "none"
    draft_width: int | str = "auto"
    acceptance: str = "off"
    accept_length: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    drafter_weights: str = ""

    @property
    def synthetic(self) -> bool:
        return self.acceptance == "pinned"


@dataclass(frozen=True)
class Card:
    """Everything that must be equal for two results to be comparable, as far as a person decides it.

    weights: hash of the weights, `random weights, seed N`, or UNKNOWN behind a foreign server. target: `in-process` or
    `http`. warm_up: requests before the first measured one, with prompts of their own. repeats: how often every prompt
    runs in every variant, interleaved. seconds: run the prompts again until this time is over, None = `repeats` times.
    """

    name: str
    model: str
    workloads: tuple[Workload, ...]
    variants: tuple[Variant, ...]
    target: str = "in-process"
    weights: str = UNKNOWN
    tokenizer: str = UNKNOWN
    seed: int = 0
    warm_up: int = 1
    repeats: int = 1
    seconds: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def hash(self) -> str:
        """Twelve hexadecimal digits that label a result; the same for the same card on every machine."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def random_weights(self) -> bool:
        return self.model.startswith("shapes:")


# ---- the machine -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """What does not change while a run lasts. versions: of packages, driver and CUDA. governor: of the CPU clock.

    commit: of the repository that soloist runs from, None outside one; dirty: whether it held uncommitted changes.
    power_limit_w, max_clock_mhz: one number a GPU, as the driver tells. unknown: name of what could not be read, here or in
    the conditions -> why not.
    """

    system: str
    cpu: str
    cores: int
    threads: int
    governor: str | None
    memory_bytes: int | None
    gpus: tuple[str, ...]
    power_limit_w: tuple[float, ...]
    max_clock_mhz: tuple[float, ...]
    versions: dict[str, str | None]
    commit: str | None
    dirty: bool | None
    unknown: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Condition:
    """What changes, read at `t_s` seconds after the run began. One number a GPU, empty without one. A run holds it before,
    between workloads, after measuring and at the end, and samples of the slowest and the fastest GPU clock meanwhile.

    throttle: names of the reasons that hold a clock down. load: the system's load average of one minute. busy: other
    processes that keep part of a core busy. other_cores: cores that other programs and the host of a virtual machine took
    on average since the reading before. cpu_clock_mhz: of the slowest and the fastest CPU. cpu_throttled: how often heat has
    held a CPU down since the system began.
    """

    t_s: float
    load: float | None
    busy: tuple[str, ...]
    clock_mhz: tuple[float, ...]
    memory_clock_mhz: tuple[float, ...]
    temperature_c: tuple[float, ...]
    power_w: tuple[float, ...]
    throttle: tuple[str, ...]
    other_cores: float | None = None
    cpu_clock_mhz: tuple[float, ...] = ()
    cpu_throttled: int | None = None


# ---- what was observed -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Tokens that became known at one moment. In process the first block is the prefill's token, every other a round.

    t_ms: since the request was sent. n: token ids in it that the request kept, None where the server does not say.
    drafted, accepted: drafts that were verified, and those found right (before a stop cut the round). round_ms: the
    engine's own time for the round. server_ms: the server's clock for the same moment, since it got the request.
    """

    t_ms: float
    n: int | None
    drafted: int | None = None
    accepted: int | None = None
    round_ms: float | None = None
    server_ms: float | None = None


@dataclass(frozen=True)
class RequestRecord:
    """One measured request.

    prompt: index of the prompt in its workload. repeat: how often the prompt ran before in this variant. at_s: when it
    was sent, since the run began. count_source: who counted output_tokens (`engine`, `token ids`, `usage`), None where
    nobody did: then no rate is given. ttft_ms: first token id. first_tokens: tokens known at that moment, None where
    the target does not say. last_ms: last token. first_text_ms: first visible text. first_answer_ms: first text that is
    no reasoning. end_ms: end of the answer at the client. rounds: blocks after the first whose drafts were told, drafted
    and accepted their sums; None where the target does not tell them. token_ids_sha256, text_sha256: of the whole
    output. cached_tokens: prompt tokens that a prefix cache served. text_same: whether the output is that of plain
    decoding, None = not checked; first_difference: index of the first other token. regret: see `metrics.py`. compiled:
    kernels compiled or graphs captured meanwhile, None where unknown. energy_j: from sending to end, of what computes, the
    GPUs or the CPU's packages. error: why it failed. blocks: empty where the JSONL file is not at hand.
    """

    variant: str
    workload: str
    domain: str
    prompt: int
    repeat: int
    at_s: float
    prompt_tokens: int | None
    output_tokens: int | None
    count_source: str | None
    ttft_ms: float | None
    first_tokens: int | None
    last_ms: float | None
    first_text_ms: float | None
    first_answer_ms: float | None
    end_ms: float
    rounds: int | None
    drafted: int | None
    accepted: int | None
    finish_reason: str | None
    token_ids_sha256: str | None = None
    text_sha256: str | None = None
    cached_tokens: int | None = None
    text_same: bool | None = None
    first_difference: int | None = None
    regret: float | None = None
    compiled: int | None = None
    energy_j: float | None = None
    error: str | None = None
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True)
class Check:
    """A question about correctness, asked in the same run. passed None: it could not be asked, `detail` says why."""

    name: str
    variant: str
    workload: str
    passed: bool | None
    detail: str = ""


# ---- what it amounts to ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distribution:
    """Of one number a request or a block. low, high: bootstrap 95 % interval of the mean, over requests; None for one."""

    mean: float
    median: float
    p90: float
    p99: float
    min: float
    max: float
    n: int
    low: float | None
    high: float | None

    @property
    def centre(self) -> float:
        return self.mean


@dataclass(frozen=True)
class Ratio:
    """A ratio of sums over all requests, and its bootstrap 95 % interval over requests (None for one request). Not a mean
    of ratios.
    """

    value: float
    numerator: float
    denominator: float
    low: float | None
    high: float | None

    @property
    def centre(self) -> float:
        return self.value


@dataclass(frozen=True)
class RoundBytes:
    """What a round of `width` drafts must move, weights and state, the drafter's passes among them: fixed_bytes, and
    position_bytes for every position of the context. experts: how many different ones a layer chose, on average; None
    without experts. Of plain decoding from shapes; otherwise counted once, in a round behind the workload's first prompt.
    """

    width: int
    fixed_bytes: int
    position_bytes: int
    experts: float | None


@dataclass(frozen=True)
class Summary:
    """One variant on one workload. distributions: metric name -> per request (or per block, as `metrics.py` says).
    ratios: metric name -> ratio of sums. rounds_by_tokens[k]: rounds that emitted k tokens. accepted_at[j], tried_at[j]:
    of drafts at place j whose predecessors were accepted, how many were, of how many. drift_percent: change of TPOT from
    the first request to the last by a straight line, and its 95 % interval. share_of_limit: the time that the bytes of all
    rounds take at the measured read rate, divided by the time of decoding. round_bytes: what it was computed from.
    """

    variant: str
    workload: str
    requests: int
    failed: int
    distributions: dict[str, Distribution]
    ratios: dict[str, Ratio]
    rounds_by_tokens: tuple[int, ...]
    accepted_at: tuple[int, ...]
    tried_at: tuple[int, ...]
    drift_percent: tuple[float, float, float] | None = None
    share_of_limit: float | None = None
    synthetic: bool = False
    round_bytes: tuple[RoundBytes, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """A variant beside its baseline on the same prompts. speedup: mean over pairs of log(baseline / variant) of
    `metric`, as a factor, with a 95 % interval; None if any text differs. p_value: of a paired sign-flip test.
    conclusion: `faster`, `slower`, `no difference found`, `too few pairs` or `failed: ...`.
    """

    baseline: str
    variant: str
    workload: str
    metric: str
    pairs: int
    speedup: float | None
    low: float | None
    high: float | None
    p_value: float | None
    conclusion: str


@dataclass(frozen=True)
class Flag:
    """Something that makes a number mean less than it seems. kind: a key of FLAGS in `flags.py`. requests: how many."""

    kind: str
    detail: str
    requests: int = 0


@dataclass(frozen=True)
class RunFile:
    """A whole run. soloist: its version. card_hash: the label of the result. command: as it was typed, without keys. started:
    when, UTC. duration_s: from the first look at the machine to the end of the checks. plans: variant name -> resolved Plan,
    or how a server is spoken to. ops: device type -> op -> implementation. read_rate: bytes a second that the device's
    memory was measured to deliver. partial: whether it was ended before its time. passed: whether every text was right.
    """

    schema_version: int
    soloist: str
    card: Card
    card_hash: str
    command: str
    started: str
    duration_s: float
    machine: Machine
    conditions: tuple[Condition, ...]
    plans: dict[str, dict[str, Any]]
    ops: dict[str, dict[str, str]]
    read_rate: float | None
    requests: tuple[RequestRecord, ...]
    summaries: tuple[Summary, ...]
    verdicts: tuple[Verdict, ...]
    checks: tuple[Check, ...]
    flags: tuple[Flag, ...]
    partial: bool
    passed: bool

    @property
    def on_gpu(self) -> bool:
        """Whether a variant ran on a GPU of this machine, as far as the plans tell."""
        return any(str(plan.get("device", "")).startswith("cuda") for plan in self.plans.values())

    def of(self, variant: str, workload: str) -> Iterator[RequestRecord]:
        """Measured requests of one variant on one workload, in the order in which they ran."""
        return (r for r in self.requests if r.variant == variant and r.workload == workload)

    def write(self, path: Path) -> None:
        """Without the blocks. Through a second file: a run that ends while it writes must not lose the one before."""
        draft = draft_path(path)
        lean = replace(self, requests=tuple(replace(r, blocks=()) for r in self.requests))
        try:
            draft.write_text(json.dumps(asdict(lean), indent=1) + "\n")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def draft_path(path: Path) -> Path:
    """What becomes the result once it is whole."""
    return path.with_name(path.name + ".part")
