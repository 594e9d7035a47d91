"""Fit a drafter's confidence to what a model really accepts of its drafts, and leave it where the engine looks for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from soloist.bench.inprocess import LlmEncoder
from soloist.bench.prompts import encoded, read_rows
from soloist.config import EngineConfig, SamplingParams
from soloist.drafters.calibration import DSPARK_FILE, MTP_FILE, fit_temperatures, write_calibration
from soloist.drafters.dspark import DsparkDrafter
from soloist.drafters.mtp import MtpDrafter
from soloist.drafters.registry import build_drafter, choose_drafter, dspark_checkpoint
from soloist.drafters.width import FixedWidth
from soloist.errors import UserError
from soloist.llm import LLM
from soloist.runtime.engine import Engine, Request
from soloist.weights.checkpoint import Checkpoint, open_checkpoint
from soloist.weights.hub import resolve_model_path

FEWEST_ROUNDS = 50
"""Below this many a temperature would follow chance."""


@dataclass(frozen=True)
class Calibrated:
    """file: where it was written. acceptance_length: tokens a round while everything was verified. The rest: see
    `Calibration`.
    """

    file: str
    drafter: str
    rounds: int
    acceptance_length: float
    temperatures: tuple[float, ...]
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]


def calibrate_drafter(
    model: str,
    drafter: str = "auto",
    drafter_path: str | None = None,
    prompts: str = "set:chat",
    num_prompts: int = 32,
    max_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    device: str = "auto",
    out: Path | None = None,
) -> dict[str, Any]:
    """Answer prompts with every draft verified, fit one temperature for each place, and write the calibration.

    Args: prompts as in a benchmark's workload, set:NAME or file:PATH; temperature: that at which the model will serve; out:
        another place for the file than the engine's.
    Returns: `Calibrated` as a dict.   Raises: UserError for a drafter that does not tell how sure it is, for too few
        rounds, and for a place that cannot be written.
    """
    with LLM(model, progress=True, device=device) as llm:
        config = EngineConfig(model, drafter=drafter, drafter_path=drafter_path, device=device)
        checkpoint = open_checkpoint(resolve_model_path(model))
        try:
            engine, file = _uncalibrated(llm, config, checkpoint)
        finally:
            checkpoint.close()
        where = f"--prompts {prompts}"
        ids = [encoded(row, i, LlmEncoder(llm), where).token_ids for i, row in enumerate(read_rows(prompts, where)[:num_prompts])]
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
        requests = (Request(prompt, llm.eos_token_ids, params) for prompt in ids if prompt)
        rounds = [round for request in requests for round in _rounds(engine, request)]
    if len(rounds) < FEWEST_ROUNDS:
        raise UserError(f"only {len(rounds)} whole rounds in {len(ids)} answers, {FEWEST_ROUNDS} are needed; raise --num-prompts "
                        "or --max-tokens")  # fmt: skip
    said, accepted = (torch.tensor(values) for values in zip(*rounds, strict=True))
    found = fit_temperatures(torch.logit(said, eps=1e-7), accepted)
    file = out or file
    try:
        write_calibration(file, found, f"{len(ids)} answers to {prompts}, temperature {temperature:g}")
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}); give another place with --out") from error
    length = float(accepted.double().mean()) + 1
    return asdict(Calibrated(str(file), engine.parts.drafter.name, len(rounds), length, found.temperatures,
                             found.errors_before, found.errors_after))  # fmt: skip


def _uncalibrated(llm: LLM, config: EngineConfig, checkpoint: Checkpoint) -> tuple[Engine, Path]:
    """An engine that drafts and verifies as much as its drafter can, whose confidence is that of its weights alone; and
    where its calibration belongs.
    """
    name = choose_drafter(config, checkpoint, llm.model_config)
    if name not in ("mtp", "dspark"):
        raise UserError(f"drafter={name} has no confidence to calibrate; choose mtp or dspark")
    drafter = build_drafter(name, config, checkpoint, llm.engine.parts.model)
    assert isinstance(drafter, MtpDrafter | DsparkDrafter) and drafter.temperatures is not None
    drafter.temperatures.fill_(1.0)
    engine = llm.engine.drafting(drafter, FixedWidth(drafter.width))
    if drafter.confidence is None:
        raise UserError("this drafter has no confidence head; there is nothing to calibrate")
    if name == "mtp":
        return engine, checkpoint.path / MTP_FILE
    return engine, dspark_checkpoint(config, checkpoint).path / DSPARK_FILE


def _rounds(engine: Engine, request: Request) -> Iterator[tuple[list[float], int]]:
    """The confidences and the accepted drafts of every round that the end of the request did not cut."""
    for result in engine.run(request):
        if result is not None and result.drafted and result.running:
            assert result.confidence is not None
            yield result.confidence, len(result.tokens) - 1
