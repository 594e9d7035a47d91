"""Soloist decodes one request at a time as fast as the hardware allows, and proves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soloist.config import EngineConfig, SamplingParams
    from soloist.errors import UserError
    from soloist.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "SamplingParams", "UserError", "__version__"]

_HOMES = {
    "LLM": "soloist.llm",
    "EngineConfig": "soloist.config",
    "SamplingParams": "soloist.config",
    "UserError": "soloist.errors",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `import soloist` and `soloist --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'soloist' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """With the names that are not imported yet, for those who look for them with the tab key."""
    return sorted({*globals(), *__all__})
