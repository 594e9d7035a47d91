"""Runs a golden checkpoint in soloist, through its own loader, and keeps what the golden files hold."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from soloist.models.decoder import Decoder
from soloist.models.registry import load_decoder, read_config
from soloist.ops import moe
from soloist.ops.route import route
from soloist.state.sequence import Sequence
from soloist.testing.checkpoints import write_checkpoint
from soloist.weights.checkpoint import open_checkpoint


@dataclass
class Run:
    """logits [T, V]; layers: the stream [T, D] after each layer; routes [routed layers, T, K], ascending."""

    logits: torch.Tensor
    layers: list[torch.Tensor]
    routes: list[torch.Tensor]


@cache
def decoder(kind: str) -> Decoder:
    """The model of a kind, written to disk and loaded from there."""
    with tempfile.TemporaryDirectory() as folder:
        return load(write_checkpoint(folder, kind))


def load(folder: Path) -> Decoder:
    checkpoint = open_checkpoint(folder)
    try:
        config = read_config(checkpoint.config)
        return load_decoder(checkpoint, config, torch.float32, torch.device("cpu"))
    finally:
        checkpoint.close()


def fresh(model: Decoder, prompt_length: int) -> Sequence:
    state = Sequence(model.cache_specs(), 256, 16, torch.device("cpu"))
    state.reset(prompt_length)
    return state


@torch.inference_mode()
def prefill(model: Decoder, ids: torch.Tensor, chunk: int, state: Sequence | None = None) -> Run:
    """Feed ids as a prompt, in chunks."""
    state = state or fresh(model, len(ids))
    parts = []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        parts.append(_forward(model, state, part, state.prefill_window(len(part), start)))
        state.commit_prefill(len(part))
    return _joined(parts)


@torch.inference_mode()
def decode(model: Decoder, ids: torch.Tensor, prompt_length: int, width: int = 1) -> Run:
    """Feed the rest of ids after its prompt in committed windows; the rows of the windows only."""
    state, parts = fresh(model, prompt_length), []
    prefill(model, ids[:prompt_length], prompt_length, state)
    for start in range(prompt_length, len(ids), width):
        part = ids[start : start + width]
        parts.append(_forward(model, state, part, state.window(len(part), start + len(part))))
        state.commit(torch.tensor([len(part)]))
    return _joined(parts)


@torch.inference_mode()
def greedy(model: Decoder, prompt: torch.Tensor, count: int) -> list[int]:
    """Prefill, then windows of one token."""
    state = fresh(model, len(prompt))
    ids = [int(prefill(model, prompt, len(prompt), state).logits[-1].argmax())]
    while len(ids) < count:
        window = state.window(1, len(prompt) + len(ids))
        run = _forward(model, state, torch.tensor(ids[-1:]), window)
        state.commit(torch.tensor([1]))
        ids.append(int(run.logits[0].argmax()))
    return ids


def _forward(model: Decoder, state: Sequence, ids: torch.Tensor, window: Any) -> Run:
    with recorded_routes() as routes:
        out = model(ids, window, state.caches, tuple(range(model.config.num_layers)))
    return Run(model.logits(out.hidden), list(out.taps), routes)


@contextmanager
def recorded_routes() -> Iterator[list[torch.Tensor]]:
    """Note the experts that the router picks, [T, K] ascending for every routed layer in turn."""
    seen: list[torch.Tensor] = []

    def noting(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, experts = route(*args)
        seen.append(experts.sort(-1).values)
        return weights, experts

    with mock.patch.object(moe, "route", noting):
        yield seen


def _joined(parts: list[Run]) -> Run:
    def rows(lists: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        return [torch.cat(same) for same in zip(*lists, strict=True)]

    return Run(torch.cat([p.logits for p in parts]), rows([p.layers for p in parts]), rows([p.routes for p in parts]))
