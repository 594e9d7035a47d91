"""Where the prompt of a command comes from: words, a file, stdin, token ids; raw or through the chat template."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from soloist.cli.flags import token_ids
from soloist.errors import UserError

if TYPE_CHECKING:
    from soloist.llm import Prompt


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_argument_group("prompt, one of")
    prompt.add_argument("text", nargs="?", metavar="TEXT", help="the prompt in quotes; - reads it from stdin")
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help="the same as a flag")
    prompt.add_argument("--prompt-file", metavar="FILE", help="a UTF-8 text file, whose last line break is dropped")
    prompt.add_argument("--prompt-ids", type=token_ids, metavar="IDS", help="token ids as 1,2,3; needs no tokenizer")
    form = parser.add_argument_group("form of the prompt")
    choice = form.add_mutually_exclusive_group()
    choice.add_argument("--raw", action="store_true", help="continue it as it stands (default)")
    choice.add_argument("--chat", action="store_true", help="send it as a user's message, in the model's chat template")
    form.add_argument("--system", metavar="TEXT", help="a system message before it; implies --chat")


def read_prompt(args: argparse.Namespace) -> Prompt:
    """The prompt from the one flag that gives it.   Raises: UserError unless there is exactly one, and it is text."""
    sources = {"TEXT": args.text, "--prompt": args.prompt, "--prompt-file": args.prompt_file,
               "--prompt-ids": args.prompt_ids}  # fmt: skip
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        came = f"{' and '.join(given)} were given together" if given else "no prompt"
        raise UserError(f'{came}; give one of "TEXT", --prompt TEXT, --prompt-file FILE, --prompt-ids IDS, - for stdin')
    chat = args.chat or args.system is not None
    if args.system is not None and args.raw:
        raise UserError("--system is part of a chat, and --raw sends none; remove one of them")
    if args.prompt_ids is not None:
        if chat:
            raise UserError("--chat needs text, and --prompt-ids gives ids; use --prompt, or remove --chat")
        ids: list[int] = args.prompt_ids
        return ids
    text = _read_text(sources[given[0]], is_file=given[0] == "--prompt-file")
    if not chat:
        return text
    system = [] if args.system is None else [{"role": "system", "content": utf8_text(args.system, "--system")}]
    return [*system, {"role": "user", "content": text}]


def _read_text(value: str, is_file: bool) -> str:
    if value != "-" and not is_file:
        return utf8_text(value, "the prompt")
    try:
        data = sys.stdin.buffer.read() if value == "-" else Path(value).read_bytes()
        text = data.decode()
    except OSError as error:
        raise UserError(f"--prompt-file {value}: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        source = "stdin" if value == "-" else value
        raise UserError(f"{source} is not UTF-8 text; convert it, e.g. with iconv") from error
    return text.removesuffix("\n").removesuffix("\r")


def utf8_text(text: str, what: str) -> str:
    """The shell's bytes that Python could not decode arrive as lone surrogates, which no tokenizer takes. In an ASCII
    locale those may be UTF-8 all the same.
    """
    try:
        return text.encode(errors="surrogateescape").decode()
    except UnicodeError as error:
        raise UserError(f"{what} is not UTF-8 text; convert it, or use --prompt-ids") from error
