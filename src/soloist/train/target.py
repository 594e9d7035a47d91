"""What a drafter is trained for: the frozen model, and what its files say about text."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from soloist.errors import UserError
from soloist.models import ling
from soloist.models.registry import family_of, fill_decoder, read_config
from soloist.text.tokenizer import Tokenizer, load_tokenizer
from soloist.weights.checkpoint import Checkpoint, open_checkpoint
from soloist.weights.hub import resolve_model_path


class Target(Protocol):
    """A frozen model that runs batches of whole sequences, and of one token each."""

    @property
    def embedding(self) -> Tensor:
        """[V, D]."""
        ...

    @property
    def head(self) -> Tensor:
        """[V, D]."""
        ...

    @property
    def num_layers(self) -> int:
        """Main layers."""
        ...

    def hidden(self, ids: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """ids [B, T] -> normed hidden state [B, T, D] fp32, tapped residual streams [B, T, D], expert loads."""
        ...

    def empty_state(self, batch: int, length: int) -> list[dict[str, Tensor]]:
        """Decode state of `batch` sequences of up to `length` tokens."""
        ...

    def step(self, ids: Tensor, state: list[dict[str, Tensor]], position: Tensor) -> Tensor:
        """Logits [B, V] fp32 after one more token of each sequence, ids [B].   Writes: state."""
        ...


@dataclasses.dataclass(frozen=True)
class Subject:
    """A target with its tokenizer and settings. config as in Hugging Face; max_length: positions it can read."""

    path: Path
    target: Target
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    mask_token_id: int
    config: dict[str, Any]
    max_length: int


def load_subject(model: str, device: torch.device) -> Subject:
    """Open a model of any supported format: bf16 on a GPU, fp32 on a CPU.

    Raises: UserError for a model that is not there, of another family, or without a tokenizer.
    """
    checkpoint = open_checkpoint(resolve_model_path(model))
    try:
        tokenizer = load_tokenizer(checkpoint.tokenizer_source)
        if tokenizer is None:
            raise UserError(f"{checkpoint.path}: has no tokenizer, and a drafter is trained on text; put tokenizer.json there")
        config = read_config(checkpoint.config)
        mask = mask_token(tokenizer, config.vocab_size, checkpoint.eos_token_ids)
        target = _load_target(checkpoint, device)
        eos, path = checkpoint.eos_token_ids, checkpoint.path
        return Subject(path, target, tokenizer, eos, mask, checkpoint.config, config.max_positions)
    finally:
        checkpoint.close()


def _load_target(checkpoint: Checkpoint, device: torch.device) -> Target:
    if family_of(checkpoint.config) is ling:
        from soloist.train.export import load_model
        from soloist.train.sample import frozen

        return frozen(load_model(checkpoint.path), device)
    from soloist.train.dense import Dense

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Dense(fill_decoder(checkpoint, read_config(checkpoint.config), dtype, device))


def mask_token(tokenizer: Tokenizer, vocab_size: int, stop_ids: tuple[int, ...]) -> int:
    """The id that stands for a place to be drafted: one that no text holds.

    A mask token by name; otherwise a row of the embedding behind the vocabulary; otherwise the last special token that
    neither ends a text nor stands in the chat template; otherwise the padding, or any special token.
    Raises: UserError where there is none.
    """
    named = (tokenizer.token_id(name) for name in ("<|mask|>", "<mask>", "[MASK]"))
    for token in named:
        if token is not None:
            return token
    if tokenizer.vocab_size < vocab_size:
        return tokenizer.vocab_size
    special = tokenizer.special_ids
    busy = {tokenizer.token_id(text) for text in tokenizer.special_tokens.values()} | set(stop_ids)
    free = {i for i in special if i not in busy and (tokenizer.token(i) or "") not in tokenizer.chat_template}
    padding = {tokenizer.token_id(tokenizer.special_tokens.get("pad_token", ""))} & special
    if not special:
        raise UserError("the tokenizer has no special token that could stand for a drafted place; add one named <mask>")
    return max(i for i in free or padding or special if i is not None)
