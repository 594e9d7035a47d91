"""Train the built-in model, its NEXTN layer or a DSpark drafter.

`train nano` goes from a folder of Debian documentation packages to a model folder; `train mtp` and `train dspark` improve
or add the drafters of a folder that it wrote, on text that the model itself generates.
"""

from __future__ import annotations

import argparse
import json


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One sub-command for each thing that can be trained."""
    from soloist.train import drafters, nano

    kinds = parser.add_subparsers(dest="what", required=True, metavar="nano|mtp|dspark", parser_class=type(parser))
    nano.add_arguments(kinds.add_parser("nano", help="corpus, tokenizer, main layers and NEXTN layer together"))
    drafters.add_arguments(kinds.add_parser("mtp", help="the NEXTN layer, on the model's own text"))
    drafters.add_arguments(kinds.add_parser("dspark", help="a DSpark drafter, on the model's own text"))


def run(args: argparse.Namespace) -> int:
    """Train and print the card of the run as JSON."""
    from soloist.train import drafters, nano

    if args.what != "nano":
        args.parts = (args.what,)
    print(json.dumps((nano if args.what == "nano" else drafters).run(args), indent=1))
    return 0
