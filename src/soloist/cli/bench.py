"""Measure, compare and report, so that a number cannot be mistaken for another.

A workload card says what is measured: a preset, or a TOML file of the same form. The result carries the card, the machine
and every request, and a hash of the card as its label.

    soloist bench run demo
    soloist bench run real --set model=smollm2 --output smollm2.json
    soloist bench run reference --set num_prompts=8 --add 5:accept_length=5,draft_width=7
    soloist bench run reference --url http://localhost:8000 --variant plain --reference nano
    soloist bench compare before.json after.json --subject machine.commit
    soloist bench report after.json --html after.html
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from pathlib import Path

from soloist.cli.flags import add_json_flag
from soloist.errors import UserError

PRESETS = "demo, reference, real, depth, sampling, stability, pinned"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s run|compare|report [FLAGS]"
    kinds = parser.add_subparsers(dest="what", required=True, metavar="run|compare|report", parser_class=type(parser),
                                  prog=parser.prog)  # fmt: skip
    _add_run(kinds.add_parser("run", help="measure a workload card", description=RUN_HELP))
    _add_compare(kinds.add_parser("compare", help="set one run beside another", description=COMPARE_HELP))
    _add_report(kinds.add_parser("report", help="write runs as HTML, Markdown or PNG", description=REPORT_HELP))


RUN_HELP = f"""Measure a workload card: one of {PRESETS}, or a TOML file.

Exit code 0 if every text is right, 1 if one is not, 130 after Ctrl+C, which keeps what was measured."""

COMPARE_HELP = """Set run B beside run A, request by request. Refused if the runs differ in anything but the subject.

Exit code 0, or 1 if B is slower by more than the tolerance, or its text is wrong."""

REPORT_HELP = "Write runs as one HTML file that needs no network, as Markdown, or as a picture; Markdown on stdout by default."


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s CARD [FLAGS]"
    parser.add_argument("card", metavar="CARD", help="name of a preset, or path of a TOML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="changes",
        help="change the card: model=smollm2, repeats=3, threads=2, output_tokens=64, variant.NAME.draft_width=3, ...",
    )  # fmt: skip
    parser.add_argument(
        "--add", action="append", default=[], metavar="NAME:KEY=VALUE,...",
        help="one more variant, as NEXTN:drafter=mtp,draft_width=3 or big:prefill_chunk=2048",
    )  # fmt: skip
    for kind in ("variant", "workload"):
        parser.add_argument(f"--{kind}", action="append", default=[], metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the result, default bench-CARD.json")
    parser.add_argument("--url", metavar="URL", help="measure the OpenAI-compatible server there")
    parser.add_argument("--served-model", metavar="NAME", help="the model's name there, default the first it lists")
    parser.add_argument("--reference", metavar="MODEL", help="load this model here, and compare the server's text with it")
    parser.add_argument("--api-key", metavar="KEY", help="for the server")
    add_json_flag(parser)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s A.json B.json [FLAGS]"
    parser.add_argument("a", type=Path, metavar="A.json")
    parser.add_argument("b", type=Path, metavar="B.json")
    parser.add_argument(
        "--subject", action="append", default=[], metavar="FIELD", help="this may differ; may be repeated"
    )
    parser.add_argument("--tolerance", type=float, default=0.02, metavar="X", help="what does not count (default 0.02)")
    add_json_flag(parser)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s RUN.json... [FLAGS]"
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN.json")
    for kind in ("html", "markdown", "png"):
        parser.add_argument(f"--{kind}", type=Path, metavar="FILE", help=f"write it as {kind}")


def run(args: argparse.Namespace) -> int:
    return {"run": _run, "compare": _compare, "report": _report}[args.what](args)


def _run(args: argparse.Namespace) -> int:
    from soloist.bench.card import load_card

    card = load_card(args.card, args.changes, args.add)
    if args.url is None:
        idle = [name for name in ("served_model", "reference", "api_key") if getattr(args, name) is not None]
        if idle:
            raise UserError(f"--{idle[0].replace('_', '-')} is about a server; give its --url")
    elif len(args.variant) > 1:
        raise UserError("a server runs one way; give one --variant with --url")
    output = args.output or free_path(f"bench-{card.name}")

    from soloist.bench.files import check_writable

    check_writable(output)

    from soloist.bench.prepare import Server, narrowed
    from soloist.bench.run import run_card
    from soloist.bench.table import run_lines

    server = None
    if args.url is not None:
        server = Server(args.url, (args.variant or [None])[0], args.served_model, args.reference, args.api_key)
    command = shlex.join(["soloist", "bench", *_shown(sys.argv[2:], args.api_key)])
    done = run_card(narrowed(card, args.variant, args.workload), output, command, progress=True, server=server)
    if args.json:
        lean = dataclasses.replace(done, requests=tuple(dataclasses.replace(r, blocks=()) for r in done.requests))
        print(json.dumps(dataclasses.asdict(lean)))
    else:
        print("\n".join(run_lines(done)))
    print(f"written to {output}", file=sys.stderr)
    return 130 if done.partial else 0 if done.passed else 1


def _compare(args: argparse.Namespace) -> int:
    from soloist.bench.compare import compare
    from soloist.bench.files import read_run
    from soloist.bench.table import comparison_lines

    found = compare(read_run(args.a), read_run(args.b), args.subject, args.tolerance)
    print(json.dumps(dataclasses.asdict(found)) if args.json else "\n".join(comparison_lines(found)))
    return found.code


def _report(args: argparse.Namespace) -> int:
    from soloist.bench.report import write_report

    text = write_report(args.runs, html=args.html, markdown=args.markdown, png=args.png)
    if not (args.html or args.markdown or args.png):
        print(text)
    return 0


def free_path(stem: str) -> Path:
    """stem.json in this folder, or stem-2.json and so on: a run never overwrites another unless it is told to."""
    for number in range(1, 10_000):
        path = Path(f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
        if not path.exists():
            return path
    raise UserError(f"{stem}.json and its successors exist; choose a name with --output")


def _shown(words: list[str], secret: str | None) -> list[str]:
    """The command line as it may be kept: without the key."""
    return words if secret is None else [word.replace(secret, "***") for word in words]
