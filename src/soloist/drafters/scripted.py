"""The scripted drafter: proposes from a list of ids. For tests, and for benchmarks with a pinned acceptance."""

from __future__ import annotations

from pathlib import Path

import torch

from soloist.drafters.drafter import Draw
from soloist.errors import UserError
from soloist.models.decoder import Decoder, Output
from soloist.state.buffers import Buffers
from soloist.state.sequence import Sequence, Window
from soloist.weights.json_file import read_json

FORMAT = '{"script": [ids...]}'


class ScriptedDrafter:
    """At output index i it proposes script[i : i + width]; behind the script's end its last token, again and again.

    The script lies in memory of a fixed place and size, so that another one can be loaded between requests.
    """

    name = "scripted"
    taps: tuple[int, ...] = ()
    confidence: torch.Tensor | None = None
    foresees = False
    law: torch.Tensor | None = None

    def __init__(self, script: tuple[int, ...], width: int):
        self.script, self.width = script, width

    def bind(self, model: Decoder, sequence: Sequence, bufs: Buffers) -> None:
        self._ids = torch.zeros(len(bufs.history), dtype=torch.int64, device=bufs.anchor.device)
        self.load(self.script)

    def load(self, script: tuple[int, ...] | list[int]) -> None:
        """Propose from this script from now on; what lies beyond the context can never be proposed."""
        assert script, "a script holds at least one id"
        kept = torch.tensor(script[: len(self._ids)], dtype=torch.int64)
        self._ids[: len(kept)].copy_(kept)
        self._ids[len(kept) :].fill_(script[-1])

    def reset(self) -> None:
        pass

    def observe(self, out: Output, following: torch.Tensor, n: torch.Tensor) -> None:
        pass

    def propose(self, bufs: Buffers, window: Window, draw: Draw) -> torch.Tensor:
        places = bufs.emitted + torch.arange(window.width, device=bufs.emitted.device)
        return self._ids[places.clamp_max(len(self._ids) - 1)]


def read_script(path: Path, vocab_size: int, width: int) -> ScriptedDrafter:
    """Raises: UserError for a file that cannot be read, is not of the FORMAT, or holds ids outside the vocabulary."""
    content = read_json(path, f"it must be {FORMAT}", f"drafter_path={str(path)!r}")
    if not isinstance(content, dict) or set(content) != {"script"} or not isinstance(content["script"], list):
        raise UserError(f"drafter_path={str(path)!r} must hold one object {FORMAT} and nothing else")
    script = content["script"]
    if not script:
        raise UserError(f"drafter_path={str(path)!r} has an empty script; give at least one id")
    for index, token in enumerate(script):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise UserError(
                f"drafter_path={str(path)!r}: script[{index}] is {token!r}; "
                f"ids are whole numbers from 0 to {vocab_size - 1}"
            )
    return ScriptedDrafter(tuple(script), width)
