"""Train the built-in model, a NEXTN layer or a DSpark drafter.

`train nano` goes from a folder of Debian documentation packages to a model folder. `train dspark` makes a drafter for a
Llama, Qwen3 or nano model from nothing but the model: the target invents prompts and answers them itself. `train mtp`
does the same for the NEXTN layer of a model that `train nano` wrote. `train calibration` fits what a drafter says of its
drafts to what the model accepts of them, by which the engine decides how many are worth verifying.
"""

from __future__ import annotations

import argparse
import json


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One sub-command for each thing that can be trained."""
    from soloist.train.flags import add_calibration, add_drafter, add_nano

    kinds = parser.add_subparsers(dest="what", required=True, metavar="nano|mtp|dspark|calibration", parser_class=type(parser))
    add_nano(kinds.add_parser("nano", help="corpus, tokenizer, main layers and NEXTN layer together"))
    add_drafter(kinds.add_parser("mtp", help="the NEXTN layer, on the model's own text"), "the model with its layer")
    add_drafter(kinds.add_parser("dspark", help="a DSpark drafter, on the model's own text"), "the drafter")
    add_calibration(kinds.add_parser("calibration", help="of a drafter's confidence, on answers to prompts"))


def run(args: argparse.Namespace) -> int:
    """Train and print the card of the run as JSON."""
    from soloist.train.flags import train

    print(json.dumps(train(args), indent=1))
    return 0
