"""The training loop: schedule, steps, progress, checkpoints and a picture of the curves.

A run is a pure function of (task, seed, steps): batches depend on the step number alone, so an interrupted run that
resumes
from its checkpoint follows the same curve.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from soloist.train.muon import MuonAdam

# steps that a run with a time budget measures its speed on, and steps between checkpoints
REHEARSAL, SAVE_EVERY = 80, 500


class Task(Protocol):
    """What is trained: a module, its optimiser, and the loss of one step."""

    optimiser: MuonAdam
    tokens_per_step: int

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        ...

    def losses(self, step: int) -> dict[str, Tensor]:
        """Scalars of one step; `loss` is the one to minimise."""
        ...

    def after_step(self, step: int) -> None:
        """Whatever is updated outside the gradient."""
        ...


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Learning rate over a run: linear warm-up steps, flat, then linear decay to zero over the last `decay` share."""

    lr: float
    steps: int
    warmup: int = 100
    decay: float = 0.4

    def at(self, step: int) -> float:
        """Learning rate of a step counted from zero."""
        warm = min(self.warmup, 1 + self.steps // 10)
        left = max(1, round(self.decay * self.steps))
        return self.lr * min(1.0, (step + 1) / warm, (self.steps - step) / left)


def autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """bf16 products on a GPU, fp32 on a CPU."""
    if device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def save_checkpoint(task: Task, step: int, folder: Path) -> None:
    """Write module, optimiser and the next step; the old checkpoint stays valid until the new one is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / "checkpoint.pt.part"
    torch.save({"step": step, "module": task.module.state_dict(), "optimiser": task.optimiser.state_dict()}, fresh)
    fresh.replace(folder / "checkpoint.pt")


def load_checkpoint(task: Task, folder: Path) -> int:
    """Restore a checkpoint where there is one. Returns the step to go on with."""
    path = folder / "checkpoint.pt"
    if not path.exists():
        return 0
    saved = torch.load(path, map_location=next(task.module.parameters()).device, weights_only=True)
    task.module.load_state_dict(saved["module"])
    task.optimiser.load_state_dict(saved["optimiser"])
    return int(saved["step"])


def fit(
    task: Task,
    schedule: Schedule,
    folder: Path,
    *,
    clip: float = 1.0,
    log_every: int = 20,
    save_every: int = SAVE_EVERY,
    stop_after: int | None = None,
    seconds: float | None = None,
    say: Callable[[str], None] = print,
) -> list[dict[str, float]]:
    """Train from the last checkpoint to `schedule.steps` and write `log.jsonl` and `curves.png` into `folder`.

    Args: save_every steps between checkpoints, beside the one at the end; stop_after end early at this step, as an
        interruption would;
        seconds wall-clock budget: the run is cut there and saved.
    Returns: the logged points of this call.
    """
    folder.mkdir(parents=True, exist_ok=True)
    step = load_checkpoint(task, folder)
    device = next(task.module.parameters()).device
    last = min(schedule.steps, stop_after if stop_after is not None else schedule.steps)
    points: list[dict[str, float]] = []
    began = mark = time.perf_counter()
    marked = first = step
    _forget_after(step, folder / "log.jsonl")
    with (folder / "log.jsonl").open("a") as log:
        while step < last:
            for group in task.optimiser.param_groups:
                group["lr"] = schedule.at(step)
            with autocast(device):
                losses = task.losses(step)
            losses["loss"].backward()
            norm = nn.utils.clip_grad_norm_(task.module.parameters(), clip)
            task.optimiser.step()
            task.optimiser.zero_grad(set_to_none=True)
            task.after_step(step)
            step += 1
            if step % log_every == 0 or step == last:
                point = {"step": step, "lr": schedule.at(step - 1), "grad_norm": float(norm)}
                point |= {name: float(value.detach()) for name, value in losses.items()}
                now = time.perf_counter()
                point["tokens_per_s"] = (step - marked) * task.tokens_per_step / (now - mark)
                mark, marked = now, step
                points.append(point)
                log.write(json.dumps(point) + "\n")
                log.flush()
                left = (last - step) * (now - began) / (step - first)
                values = "  ".join(f"{n} {float(v.detach()):.4f}" for n, v in losses.items())
                say(f"step {step}/{last}  {values}  {point['tokens_per_s'] / 1e3:.1f}k tok/s  {left:.0f} s left")
                if seconds is not None and now - began > seconds and step < last:
                    say(f"stopped at step {step}: the budget of {seconds:.0f} s is spent")
                    break
            if step % save_every == 0:
                save_checkpoint(task, step, folder)
    save_checkpoint(task, step, folder)
    draw_curves(folder)
    return points


def _forget_after(step: int, log: Path) -> None:
    """Drop points of an interrupted run that lie behind its last checkpoint: they are about to come again."""
    if log.exists():
        lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))


def fit_within(
    task: Task,
    schedule: Schedule,
    folder: Path,
    seconds: float | None,
    *,
    log_every: int = 20,
    say: Callable[[str], None] = print,
) -> list[dict[str, float]]:
    """`fit`, with the number of steps chosen from a time budget: the first `REHEARSAL` steps are timed, the rest
    follows.

    The number is stored in `steps.json`, so that a resumed run keeps its schedule.
    Args: schedule its `steps` count where `seconds` is None; seconds for everything, compilation included.
    """
    if seconds is None:
        return fit(task, schedule, folder, log_every=log_every, say=say)
    began, stored, points = time.perf_counter(), folder / "steps.json", []
    if not stored.exists():
        endless = dataclasses.replace(schedule, steps=1_000_000_000)
        points = fit(task, endless, folder, log_every=REHEARSAL // 4, stop_after=REHEARSAL, say=say)
        per_second = points[-1]["tokens_per_s"] / task.tokens_per_step
        left = seconds - (time.perf_counter() - began)
        stored.write_text(json.dumps(REHEARSAL + max(1, int(left * per_second * 0.97))))
    steps = json.loads(stored.read_text())
    rest = seconds - (time.perf_counter() - began)
    return points + fit(task, dataclasses.replace(schedule, steps=steps), folder, log_every=log_every, seconds=rest, say=say)


def draw_curves(folder: Path) -> None:
    """Draw `curves.png` from `log.jsonl`. Without matplotlib there is no picture, only the log."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    if not points:
        return
    names = [n for n in points[0] if n not in ("step", "lr", "grad_norm", "tokens_per_s")]
    figure, axes = pyplot.subplots(1, len(names), figsize=(5 * len(names), 3.5), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        axis.plot([p["step"] for p in points], [p[name] for p in points], linewidth=1)
        axis.set_title(name)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(folder / "curves.png", dpi=100)
    pyplot.close(figure)
