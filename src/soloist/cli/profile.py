"""Show where the time of one round goes: time, bytes and share of the memory's limit, op by op.

The prompt is random ids. With a drafter a round drafts as many tokens as --draft-width says; --rows N runs rounds of N
rows whose drafts cost nothing, as if somebody else had drafted.

    soloist profile --model nano
    soloist profile --model shapes:ling-3.0-tiny --context 8192 --rows 4 --trace round.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from soloist.cli.flags import add_engine_flags, add_json_flag, engine
from soloist.errors import UserError

if TYPE_CHECKING:
    from soloist.bench.profile import Profile
    from soloist.llm import LLM

HEADINGS = ("op", "calls", "ms", "of the round", "MB", "GB/s", "of the limit")


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_json_flag(parser)
    parser.add_argument("--context", type=int, default=512, metavar="N", help="tokens before the round (default 512)")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="rounds to measure (default 20)")
    parser.add_argument("--rows", type=int, metavar="N", help="rows of a round, without a drafter of its own")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace of some rounds")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    settings = {"prefix_cache_bytes": 0, **engine(args)}
    _check(args, settings.get("drafter", "none"))

    from soloist.bench.profile import profile, random_ids
    from soloist.llm import LLM

    with tempfile.TemporaryDirectory() as folder, LLM(progress=True, **settings) as llm:
        chosen = _fixed(llm) if args.rows is None else _of_rows(llm, args.rows, Path(folder))
        prompt = random_ids(llm.model_config.vocab_size, args.context)
        found = profile(chosen, prompt, args.rounds, args.trace)
    print(json.dumps(as_record(found)) if args.json else "\n".join(as_lines(found)))
    return 0


def _check(args: argparse.Namespace, drafter: str) -> None:
    from soloist.config import MAX_WINDOW

    for name, most in (("context", None), ("rounds", None), ("rows", MAX_WINDOW)):
        value = getattr(args, name)
        if value is not None and (value < 1 or most is not None and value > most):
            raise UserError(f"--{name} {value} must be {'at least 1' if most is None else f'from 1 to {most}'}")
    if args.rows is not None and drafter != "none":
        raise UserError(f"--rows {args.rows} stands for a drafter, and --drafter is {drafter}; give --draft-width instead")
    if args.trace is not None and not args.trace.resolve().parent.is_dir():
        raise UserError(f"--trace {args.trace}: there is no folder {args.trace.parent}; make it first")


def _fixed(llm: LLM) -> LLM:
    """With the widest draft in every round, where the width would follow the clock."""
    if llm.plan.width_choice != "auto":
        return llm
    return llm.with_drafter(llm.plan.drafter, llm.config.drafter_path, llm.plan.draft_width, llm.config.acceptance)


def _of_rows(llm: LLM, rows: int, folder: Path) -> LLM:
    from soloist.bench.pinned import write_script
    from soloist.bench.profile import random_ids

    if rows == 1:
        return llm
    script = folder / "drafts.json"
    write_script(script, random_ids(llm.model_config.vocab_size, llm.plan.context_length))
    return llm.with_drafter("scripted", str(script), rows - 1)


def as_record(found: Profile) -> dict[str, object]:
    """The JSON object: the fields of Profile, and what follows from them."""
    return {**dataclasses.asdict(found), "num_bytes": found.num_bytes, "limit_ms": found.limit_ms}


def as_lines(found: Profile) -> list[str]:
    """The table for a terminal."""
    rows: list[tuple[str, ...]] = [HEADINGS]
    for row in found.table:
        rows.append((row.op, str(row.calls or ""), *_numbers(row.ms, found, row.num_bytes)))
        if len(row.parts) > 1:
            rows += [(f"  {p.name[:60]}", str(p.calls), *_numbers(p.ms, found)) for p in sorted(row.parts, key=lambda p: -p.ms)]
    rows += [("nothing running" if found.on_gpu else "between ops", "", *_numbers(found.gap_ms, found))]
    rows += [("watched round", "", *_numbers(found.watched_ms, found, found.num_bytes))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip()
             for row in rows]  # fmt: skip
    drafter = "" if found.drafter == "none" else f", drafter {found.drafter}"
    experts = "" if found.experts is None else f"; a layer chose {found.experts:.1f} different experts on average"
    return [
        *([] if found.caveat is None else [found.caveat]),
        f"{found.model} on {found.device}, {found.dtype}{drafter}: rounds of {found.rows} rows behind {found.context} tokens",
        "", *lines, "",
        f"unwatched a round takes {found.round_ms:.3f} ms; its {found.num_bytes / 1e6:.1f} MB at {found.read_rate / 1e9:.1f} "
        f"GB/s take {found.limit_ms:.3f} ms: {found.limit_ms / found.round_ms:.0%} of the limit{experts}",
    ]  # fmt: skip


def _numbers(ms: float, found: Profile, num_bytes: int = 0) -> tuple[str, ...]:
    """ms, of the round, MB, GB/s, of the limit; the last three only where bytes are known."""
    told = (f"{ms:.3f}", f"{ms / found.watched_ms:.1%}")
    if not num_bytes or not ms:
        return (*told, "", "", "")
    rate = num_bytes / ms * 1e3
    return (*told, f"{num_bytes / 1e6:.2f}", f"{rate / 1e9:.1f}", f"{rate / found.read_rate:.0%}")
