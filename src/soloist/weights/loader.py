"""Fill a model from a checkpoint: every tensor used or ignored by name, every parameter filled exactly once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from soloist.dist.share import cuts, whole
from soloist.errors import UserError
from soloist.weights.checkpoint import Checkpoint

QUIET_BYTES = 1 << 30
"""Smaller checkpoints load without a progress bar: it would be gone before it could be read."""


@dataclass(frozen=True)
class Names:
    """Where a family's tensors go, and which left-over names are no fault.

    destinations: checkpoint name -> `module path:slot`; ignored: patterns; twins: (name that may be stored a second
    time, name it must equal), as a tied head that is stored all the same.
    """

    destinations: dict[str, str]
    ignored: Sequence[str] = ()
    twins: Sequence[tuple[str, str]] = ()


def fill(model: nn.Module, names: Names, checkpoint: Checkpoint, progress: bool = False) -> None:
    """Copy tensors to their slots, converting to the slot's dtype and device; one tensor in memory at a time. Of a
    tensor that ranks share, this rank's part is read, and nothing of one that lies with another rank.

    Raises: UserError naming missing, unexpected, misshapen and non-finite tensors, before anything else is read.
    """
    slots, shapes = model_slots(model), model_shapes(model)
    unfilled = set(slots) - set(names.destinations.values())
    assert not unfilled, f"no rule fills {sorted(unfilled)[:5]}"
    _check_names(names, checkpoint)
    _check_shapes(names.destinations, shapes, checkpoint)
    _check_twins(names.twins, checkpoint)
    here = {name: target for name, target in names.destinations.items() if target in slots}
    for name in _in_file_order(here, checkpoint, progress):
        tensor = checkpoint.read(name, cuts(shapes[here[name]]))
        if not torch.isfinite(tensor).all():
            raise UserError(f"{checkpoint.path}: tensor {name} holds NaN or infinite values; the file is damaged")
        slots[here[name]].copy_(tensor)


def model_slots(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every slot of a model that has not been prepared yet: `module path:slot` -> view to copy into."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        if not hasattr(module, "slots"):
            continue
        for name, view in module.slots().items():
            if view.data_ptr() not in seen:  # a tied head shows the embedding again
                found[f"{path}:{name}"] = view
            seen.add(view.data_ptr())
    return found


def model_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """`module path:slot` -> its shape, also of slots that other ranks fill; sizes may be shares."""
    return {
        f"{path}:{name}": shape
        for path, module in model.named_modules()
        if hasattr(module, "shapes")
        for name, shape in module.shapes().items()
    }


def _check_names(names: Names, checkpoint: Checkpoint) -> None:
    present, expected = set(checkpoint.tensors), set(names.destinations)
    pattern = re.compile("|".join(names.ignored)) if names.ignored else None
    twins = {name for name, _ in names.twins}
    missing = sorted(expected - present)
    extra = sorted(n for n in present - expected - twins if not (pattern and pattern.search(n)))
    if missing or extra:
        parts = [f"lacks {_some(missing)}"] if missing else []
        parts += [f"has unexpected {_some(extra)}"] if extra else []
        raise UserError(f"{checkpoint.path}: the checkpoint {' and '.join(parts)}")


def _check_shapes(destinations: dict[str, str], shapes: dict[str, tuple[int, ...]], checkpoint: Checkpoint) -> None:
    wrong = []
    for name, target in destinations.items():
        expected, found = tuple(map(whole, shapes[target])), tuple(checkpoint.tensors[name].shape)
        if expected != found:
            wrong.append(f"{name} is {list(found)}, config.json asks for {list(expected)}")
    if wrong:
        raise UserError(f"{checkpoint.path}: wrong shapes: {_some(wrong, '; ')}")


def _check_twins(twins: Sequence[tuple[str, str]], checkpoint: Checkpoint) -> None:
    for name, original in twins:
        if name in checkpoint.tensors and not torch.equal(checkpoint.read(name), checkpoint.read(original)):
            raise UserError(
                f"{checkpoint.path}: config.json ties {name} to {original}, but the stored tensors differ; "
                "set tie_word_embeddings to false to use both"
            )


def _some(items: list[str], separator: str = ", ", limit: int = 5) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + more


def _in_file_order(destinations: dict[str, str], checkpoint: Checkpoint, progress: bool) -> Iterator[str]:
    """Names file by file, with a bar of bytes on stderr for long loads."""
    wanted = [name for names in checkpoint.names_by_file() for name in names if name in destinations]
    total = sum(checkpoint.tensors[name].bytes for name in wanted)
    if not progress or total < QUIET_BYTES:
        yield from wanted
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="B", unit_scale=True, desc="loading weights") as bar:
        for name in wanted:
            yield name
            bar.update(checkpoint.tensors[name].bytes)
