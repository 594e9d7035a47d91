"""Train the built-in model, a NEXTN layer or a DSpark drafter.

`train nano` goes from a folder of Debian documentation packages to a model folder. `train dspark` makes a drafter for a
Llama, Qwen3 or nano model from nothing but the model: the target invents prompts and answers them itself. `train mtp`
does the same for the NEXTN layer of a model that `train nano` wrote. `train calibration` fits what a drafter says of its
drafts to what the model accepts of them, by which the engine decides how many are worth verifying.
"""

from __future__ import annotations

import argparse
import json

KINDS = {
    "nano": "corpus, tokenizer, main layers and NEXTN layer together",
    "mtp": "the NEXTN layer, on the model's own text",
    "dspark": "a DSpark drafter, on the model's own text",
    "calibration": "a drafter's confidence, on answers to prompts",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One sub-command for each thing that can be trained."""
    from soloist.train.flags import add_calibration, add_drafter, add_nano

    parser.usage = f"%(prog)s {'|'.join(KINDS)} [FLAGS]"
    kinds = parser.add_subparsers(dest="what", required=True, metavar="|".join(KINDS), parser_class=type(parser),
                                  prog=parser.prog)  # fmt: skip
    parsers = {kind: kinds.add_parser(kind, help=what, description=f"What is trained: {what}.") for kind, what in KINDS.items()}
    add_nano(parsers["nano"])
    add_drafter(parsers["mtp"], "the model with its layer")
    add_drafter(parsers["dspark"], "the drafter")
    add_calibration(parsers["calibration"])


def run(args: argparse.Namespace) -> int:
    """Train and print the card of the run as JSON."""
    from soloist.train.flags import train

    print(json.dumps(train(args), indent=1))
    return 0
