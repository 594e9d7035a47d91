"""Loaded models of tiny random checkpoints, shared by the tests of the Python API."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

from soloist import LLM, SamplingParams
from soloist.testing.checkpoints import write_checkpoint

PROMPT = [5, 17, 88, 3, 41, 17, 60]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def fresh(kind: str, tokenizer: bool = False, settings: dict[str, Any] | None = None, **overrides: Any) -> LLM:
    """A model nobody else uses. settings: of the engine; overrides: of config.json."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(folder, kind, tokenizer=tokenizer, **overrides)
        return LLM(folder, **{"context_length": 64, "dtype": "float32", "device": "cpu", **(settings or {})})


@cache
def shared(kind: str, tokenizer: bool = False) -> LLM:
    return fresh(kind, tokenizer)


@cache
def small() -> LLM:
    """Twelve tokens and one layer: distributions that can be counted."""
    return fresh("llama", vocab_size=12, num_hidden_layers=1, bos_token_id=0, eos_token_id=11, initializer_range=1)


@cache
def greedy_ids(kind: str, tokenizer: bool = False) -> list[int]:
    """What a model says that has never served another request."""
    return fresh(kind, tokenizer).generate(PROMPT, GREEDY).token_ids


@cache
def nano(drafter: str = "none", width: int | str = "auto", acceptance: str = "equality") -> LLM:
    """The built-in model, loaded once."""
    if drafter == "none":
        return LLM(device="cpu", context_length=1024)
    return nano().with_drafter(drafter, None, width, acceptance)
