"""Which family a checkpoint belongs to, and how to build and fill its decoder."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from soloist.config import ModelConfig
from soloist.dist.group import SOLO, Group
from soloist.errors import UserError
from soloist.layers.linear import prepare
from soloist.models import ling, llama, qwen3
from soloist.models.decoder import Decoder
from soloist.models.rules import destinations
from soloist.weights.checkpoint import Checkpoint
from soloist.weights.loader import Names, fill
from soloist.weights.shapes import Shapes, fill_random

FAMILIES: tuple[ModuleType, ...] = (ling, llama, qwen3)


def family_of(hf: dict[str, Any]) -> ModuleType:
    """The family by `architectures`: model_type alone does not tell Ling-3.0 from Ling-2.6."""
    architectures = hf.get("architectures") or []
    for family in FAMILIES:
        if isinstance(architectures, list) and architectures[:1] and architectures[0] in family.ARCHITECTURES:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.ARCHITECTURES)
    raise UserError(
        f"config.json has architectures={architectures!r} (model_type={hf.get('model_type')!r}); supported: {known}"
    )


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """config.json -> ModelConfig. Raises: UserError for what is missing, unknown or not supported."""
    if hf.get("quantization_config"):
        raise UserError("config.json has a quantization_config; quantised checkpoints are not supported yet: use bf16")
    model: ModelConfig = family_of(hf).config(hf)
    return model


def load_decoder(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool = False,
    group: Group = SOLO,
) -> Decoder:
    """A rank's decoder, or the whole one, filled and ready to run."""
    decoder = fill_decoder(checkpoint, config, dtype, device, progress, group)
    prepare(decoder)
    return decoder.eval()


def fill_decoder(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool = False,
    group: Group = SOLO,
) -> Decoder:
    """Build the decoder, or a rank's share of it, and fill every parameter from the checkpoint exactly once. The weights
    stay as they are stored, row by row, for readers other than the engine.
    """
    family = family_of(checkpoint.config)
    decoder = Decoder(config, dtype, device, group)
    if isinstance(checkpoint, Shapes):
        fill_random(decoder)
        return decoder
    twins = [(head, embed) for head in family.RULES["head"] for embed in _embedding(family)] if config.tied_head else []
    fill(decoder, Names(destinations(family.RULES, config), family.IGNORED_TENSORS, twins), checkpoint, progress)
    return decoder


def _embedding(family: ModuleType) -> list[str]:
    return [name for name, target in family.RULES["model"].items() if target == "embed:weight"]
