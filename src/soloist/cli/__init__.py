"""The command line. A command is a module here, imported when it is called for, and a line in COMMANDS.

The module has `add_flags(parser)` and `run(args) -> exit code`; its docstring is what `--help` says.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper

from soloist import __version__
from soloist.cli.flags import Parser
from soloist.errors import RankLost, UserError

COMMANDS = {
    "generate": "answer one prompt",
    "chat": "talk with a model in the terminal",
    "serve": "serve a model with OpenAI's API",
    "bench": "measure a workload card, compare runs, write reports",
    "profile": "show where the time of one round goes, op by op",
    "train": "train nano, its NEXTN layer or a DSpark drafter",
    "explain": "show how a model would run here, op by op, and what bounds its speed",
    "doctor": "say why this machine will be slow, and what to do about it",
    "version": "show versions of soloist and of what it stands on",
}

HELP = """usage: soloist COMMAND [FLAGS]

Answers one request at a time as fast as the hardware allows.

commands:
{commands}

`soloist COMMAND --help` lists the flags of a command.
"""

OK, LOST, DISK_FULL, USER_ERROR, INTERRUPTED, PIPE_CLOSED = 0, 1, 1, 2, 130, 141
"""Exit codes. The last two are what a shell reports for a program that SIGINT or SIGPIPE ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default the process's own, and return the exit code.

    A UserError becomes one line on stderr and code 2, a lost rank or a full disk one line and code 1. Ctrl+C gives 130, a
    reader that went away 141, both without a traceback.
    """
    _prepare_streams()
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except SystemExit as help_shown:
        return int(help_shown.code or OK)
    except UserError as error:
        print(f"soloist: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return USER_ERROR
    except RankLost as error:
        print(f"soloist: {error}", file=sys.stderr)
        return LOST
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return PIPE_CLOSED
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"soloist: {error.filename or 'what goes to stdout'}: no space is left there; make room", file=sys.stderr)
        _drop_output()
        return DISK_FULL


def _prepare_streams() -> None:
    """A closed stream is an empty one. A letter that the terminal cannot show must not end the answer. And lines leave at
    once, or they would stand behind later ones of stderr where both go to one file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace", line_buffering=True)


def _drop_output() -> None:
    """What could not be written is not tried again, or the flush at exit would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str]) -> int:
    if not argv:
        print(_help(), end="", file=sys.stderr)
        return USER_ERROR
    name, rest = argv[0], argv[1:]
    if name in ("-h", "--help"):
        print(_help(), end="")
        return OK
    if name in ("-V", "--version"):
        print(f"soloist {__version__}")
        return OK
    if name not in COMMANDS:
        raise UserError(_unknown(name))
    command = import_module(f"soloist.cli.{name}")
    parser = Parser(f"soloist {name}", str(command.__doc__))
    command.add_flags(parser)
    code: int = command.run(parser.parse_args(rest))
    return code


def _help() -> str:
    width = max(map(len, COMMANDS))
    return HELP.format(commands="\n".join(f"  {name:{width}}  {what}" for name, what in COMMANDS.items()))


def _unknown(name: str) -> str:
    if name.startswith("-"):
        return f"{name} stands before the command; write `soloist COMMAND {name} ...`, see `soloist --help`"
    near = get_close_matches(name, COMMANDS, 1)
    return f"no command {name!r}; " + (f"did you mean {near[0]}?" if near else f"commands are {', '.join(COMMANDS)}")
