"""What the rounds of a run had to move, from which follows how near it came to what the memory delivers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import torch

from soloist.bench.inprocess import InProcess
from soloist.bench.observe import Call
from soloist.bench.records import RequestRecord, RoundBytes
from soloist.bench.target import Prompt
from soloist.config import MoeConfig
from soloist.llm import LLM
from soloist.runtime.traffic import read_rate, token_traffic


def memory_rate(llm: LLM) -> float:
    """Bytes a second that the model's device reads, measured now."""
    return read_rate(torch.device(llm.plan.device))


def plain_bytes(llm: LLM) -> RoundBytes:
    """Of a round of plain decoding on this rank, from shapes."""
    dtype = getattr(torch, llm.plan.dtype)
    none, one = (token_traffic(llm.model_config, dtype, context, llm.group).total_bytes for context in (0, 1))
    chosen = [block.mlp.top_k for block in llm.model_config.blocks if isinstance(block.mlp, MoeConfig)]
    return RoundBytes(0, none, one - none, mean(chosen) if chosen else None)


def counted_bytes(
    target: InProcess, prompt: Prompt, sampling: Mapping[str, Any], requests: Sequence[RequestRecord]
) -> tuple[RoundBytes, ...]:
    """Of every width in the requests, counted in a round of each; nothing for one of several ranks, which go in step."""
    widths = sorted({block.drafted for r in requests for block in r.blocks[1:] if block.drafted is not None})
    if not widths or target.llm.config.tensor_parallel > 1:
        return ()
    rounds = target.round_calls(prompt, sampling, widths)
    return tuple(_bytes_of(width, calls) for width, calls in zip(widths, rounds, strict=True))


def _bytes_of(width: int, calls: Sequence[Call]) -> RoundBytes:
    fixed, at_positions = (sum(getattr(call, name) for call in calls) for name in ("fixed_bytes", "position_bytes"))
    experts = [call.experts for call in calls if call.experts]
    return RoundBytes(width, fixed, at_positions, mean(experts) if experts else None)
