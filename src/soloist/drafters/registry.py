"""Which drafter a configuration means, and how wide it drafts."""

from __future__ import annotations

from pathlib import Path

from soloist.config import MAX_WINDOW, EngineConfig, ModelConfig
from soloist.drafters.calibration import MTP_FILE, read_temperatures
from soloist.drafters.drafter import Drafter, NoDraft
from soloist.drafters.ngram import NgramDrafter
from soloist.drafters.scripted import read_script
from soloist.drafters.width import AutoWidth, FixedWidth, WidthChoice
from soloist.errors import UserError
from soloist.models.decoder import Decoder
from soloist.weights.checkpoint import Checkpoint, open_checkpoint
from soloist.weights.hub import resolve_model_path

DSPARK_FOLDER = "dspark"
"""Where a model's folder holds the drafter that was trained for it."""


def choose_drafter(config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig) -> str:
    """The drafter's name with `auto` resolved: what drafter_path is, else the best that the checkpoint brings along.

    Raises: UserError for a drafter that the checkpoint lacks.
    """
    own_dspark = (checkpoint.path / DSPARK_FOLDER).is_dir()
    if config.drafter == "auto":
        if config.drafter_path is not None:
            return "scripted" if Path(config.drafter_path).suffix == ".json" else "dspark"
        return "dspark" if own_dspark else "mtp" if model.mtp_blocks else "ngram"
    if config.drafter == "mtp" and not model.mtp_blocks:
        raise UserError(f"drafter=mtp, but {checkpoint.path} has no MTP layer; use drafter=ngram or drafter=auto")
    if config.drafter == "dspark" and config.drafter_path is None and not own_dspark:
        raise UserError(
            f"drafter=dspark, but {checkpoint.path} brings no DSpark drafter along; give its folder as drafter_path"
        )
    return config.drafter


REJECTION_WIDTH = 4
"""What draft_width=auto means with acceptance=rejection, for drafters that can draft any number of tokens."""


def most_drafted(name: str, config: EngineConfig, checkpoint: Checkpoint) -> int:
    """Most tokens that are drafted a round: what the configuration asks, and no more than a DSpark block holds."""
    if name == "none":
        return 0
    if isinstance(config.draft_width, str):
        most = MAX_WINDOW - 1 if is_auto(config) else REJECTION_WIDTH
    else:
        most = config.draft_width
    if name != "dspark":
        return most
    from soloist.drafters.dspark import read_config

    return min(most, read_config(dspark_checkpoint(config, checkpoint)).num_drafts)


def dspark_checkpoint(config: EngineConfig, checkpoint: Checkpoint) -> Checkpoint:
    """Of the drafter that drafter_path names, else the one in the model's folder."""
    own = checkpoint.path / DSPARK_FOLDER
    return open_checkpoint(own if config.drafter_path is None else resolve_model_path(config.drafter_path))


def build_drafter(name: str, config: EngineConfig, checkpoint: Checkpoint, decoder: Decoder) -> Drafter:
    """The drafter that `choose_drafter` named.   Raises: UserError for files that are not what they should be."""
    most = most_drafted(name, config, checkpoint)
    if name == "none":
        return NoDraft()
    if name == "ngram":
        return NgramDrafter(most)
    if name == "scripted":
        assert config.drafter_path is not None
        return read_script(Path(config.drafter_path), decoder.config.vocab_size, most)
    if name == "mtp":
        from soloist.drafters.mtp import build_mtp

        asked = is_auto(config)
        return build_mtp(decoder, most, read_temperatures(checkpoint.path / MTP_FILE) or [1.0] if asked else None)
    from soloist.drafters.dspark import build_dspark

    return build_dspark(dspark_checkpoint(config, checkpoint), decoder, most)


def width_choice(config: EngineConfig, drafter: Drafter) -> WidthChoice:
    """How the engine decides how much of the drafter's width to use."""
    return (
        AutoWidth(drafter.width, drafter.foresees) if is_auto(config) and drafter.width else FixedWidth(drafter.width)
    )


def is_auto(config: EngineConfig) -> bool:
    """Whether the width may follow the clock. By rejection the text depends on the width, so there it must not."""
    return config.draft_width == "auto" and config.acceptance == "equality"
