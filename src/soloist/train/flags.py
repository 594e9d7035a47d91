"""Flags of `soloist train`. Nothing here imports torch before something is trained: `--help` must be quick."""

from __future__ import annotations

import argparse
from pathlib import Path

OWN_NANO = "runs/nano"
"""Where `train nano` writes."""


def add_nano(parser: argparse.ArgumentParser) -> None:
    """Flags of `soloist train nano`; defaults are those of `train_nano`."""
    parser.add_argument("--out", default=OWN_NANO, help=f"folder of the finished model (default: {OWN_NANO})")
    parser.add_argument("--work", default="runs/work", help="folder of corpus, checkpoints and curves (default: runs/work)")
    parser.add_argument("--packages", help="folder of Debian documentation packages (.deb); needed for the first run")
    parser.add_argument("--steps", type=int, help="steps of --batch times --length tokens (default: 6000)")
    parser.add_argument("--minutes", type=float, help="time budget that replaces --steps")
    parser.add_argument("--batch", type=int, help="sequences per step (default: 16)")
    parser.add_argument("--length", type=int, help="tokens per sequence (default: 4096)")
    _add_common(parser)


def add_drafter(parser: argparse.ArgumentParser, out: str) -> None:
    """Flags of `soloist train mtp` and `train dspark`; defaults are those of `Settings`. out: what goes into --out."""
    parser.add_argument("--model", help=f"folder, .gguf file or name of the target (default: {OWN_NANO} after `train nano`, "
                        "otherwise nano)")  # fmt: skip
    parser.add_argument("--out", type=Path, help=f"folder of {out} (default: in or beside the model's)")
    parser.add_argument("--work", type=Path, help="folder for texts, checkpoints and curves (default: below runs/work)")
    parser.add_argument("--texts", type=int, help="texts that the target writes to train on (default: 16384)")
    parser.add_argument("--width", type=int, help="most tokens of a text, prompt included (default: 512)")
    parser.add_argument("--prompts", nargs="+", metavar="FILE", help="JSONL files with messages, turns or text, to train on; "
                        "what is missing the target invents")  # fmt: skip
    parser.add_argument("--held-out", nargs="+", metavar="FILE", help="JSONL files, or bundled sets as set:NAME, to measure on "
                        "(default: the bundled sets)")  # fmt: skip
    parser.add_argument("--measured", type=int, help="most prompts of a domain to measure on (default: 64)")
    parser.add_argument("--answer", type=int, help="most tokens of an answer to measure on (default: 256)")
    parser.add_argument("--minutes", type=float, help="time to train, writing and measuring apart (default: 5)")
    parser.add_argument("--steps", type=int, help="steps to train, instead of --minutes")
    parser.add_argument("--batch", type=int, help="texts of a step (default: 32)")
    parser.add_argument("--anchors", type=int, help="places of a text to draft from in a step (default: 128)")
    _add_common(parser)


def add_calibration(parser: argparse.ArgumentParser) -> None:
    """Flags of `soloist train calibration`; defaults are those of `calibrate_drafter`."""
    parser.add_argument("--model", default="nano", help="folder or name of the model (default: nano)")
    parser.add_argument("--drafter", help="mtp, dspark or auto (default: auto)")
    parser.add_argument("--drafter-path", metavar="FOLDER", help="the DSpark drafter, where it is not part of the model")
    parser.add_argument("--prompts", metavar="SOURCE", help="set:NAME, a bundled set, or file:PATH, JSONL with messages, turns, "
                        "text or token_ids (default: set:chat)")  # fmt: skip
    parser.add_argument("--num-prompts", type=int, metavar="N", help="prompts to answer (default: 32)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer (default: 128)")
    parser.add_argument("--temperature", type=float, metavar="X", help="that the model will serve at (default: 0)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="(default: where the engine reads it)")
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, help="(default: 0)")
    parser.add_argument("--device", help="auto, cuda or cpu (default: auto)")


def train(args: argparse.Namespace) -> dict[str, object]:
    """Train what was asked for with the flags that were set.   Returns: the card of the run."""
    given = {name: value for name, value in vars(args).items() if value is not None and name != "what"}
    if args.what == "calibration":
        from soloist.train.confidence import calibrate_drafter

        return calibrate_drafter(**given)
    if args.what == "nano":
        from soloist.train.nano import train_nano

        return train_nano(given.pop("out"), given.pop("work"), **given)
    from soloist.train.drafters import train_dspark_drafter, train_mtp_layer
    from soloist.train.material import Settings

    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    given.setdefault("model", OWN_NANO if Path(OWN_NANO).is_dir() else "nano")
    return (train_mtp_layer if args.what == "mtp" else train_dspark_drafter)(Settings(**given))
