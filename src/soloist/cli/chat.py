"""Talk with a model in the terminal. It needs a chat template, and remembers the conversation until /reset.

    /system TEXT   set the system message, without TEXT remove it
    /reset         forget the conversation, keep the system message
    /help          this list
    /exit          leave, as Ctrl+D does

Ctrl+C stops an answer, and what came of it stays in the conversation; a second one leaves. Without a terminal every
line of stdin is one message, and --json prints one object a line for each answer.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from soloist.cli.answer import answer, summary
from soloist.cli.flags import add_engine_flags, add_json_flag, add_sampling_flags, engine, sampling
from soloist.cli.prompt import utf8_text
from soloist.config import SamplingParams
from soloist.errors import UserError

if TYPE_CHECKING:
    from soloist.llm import LLM, Output

DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1024}
TURNED_AWAY = "; the message was not kept. /reset forgets the conversation"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    add_json_flag(parser)
    add_engine_flags(parser)
    add_sampling_flags(parser, DEFAULTS)


def run(args: argparse.Namespace) -> int:
    settings, params = engine(args), sampling(args)
    if params.logprobs is not None and not args.json:
        raise UserError("--logprobs are reported in JSON only; add --json")

    from soloist.llm import LLM

    with LLM(progress=True, **settings) as llm:
        conversation = Conversation(llm, params, args.system, args.json)
        llm.encode([{"role": "user", "content": "?"}])  # no template: say so now, not after the first message
        interactive = sys.stdin.isatty() and sys.stdout.isatty()
        if interactive:
            note(f"{llm.plan.model}: /help lists commands, Ctrl+C stops an answer, Ctrl+D leaves")
        lines = typed_lines(conversation) if interactive else piped_lines()
        for line in lines:
            if not conversation.take(line):
                break
    return 2 if conversation.refused and not interactive else 0


class Conversation:
    """The messages so far, and what to do with the next line.

    refused: messages that got no answer. interrupts: Ctrl+C presses since the last line; the second leaves.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, as_json: bool = False):
        self.llm, self.params, self.system, self.as_json = llm, params, system, as_json
        self.turns: list[dict[str, Any]] = []
        self.refused = 0
        self.interrupts = 0

    @property
    def messages(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns]

    def take(self, line: str) -> bool:
        """Obey or answer a line; returns False to leave."""
        self.interrupts = 0
        command = re.fullmatch(r"/([a-z]+)(?:\s+(.*))?", line.rstrip(), re.S)
        if command:
            return self._obey(command[1], command[2] or "")
        if line.strip():
            self._say(line.strip())
        return True

    def _obey(self, command: str, text: str) -> bool:
        if command == "exit":
            return False
        if command == "help":
            note(str(__doc__).split("\n\n")[1])
        elif command == "reset":
            self.turns = []
            note("forgot the conversation")
        elif command == "system":
            self.system = text or None
            note("the system message is set" if text else "there is no system message now")
        else:
            note(f"no command /{command}; /help lists them. To send such a line, put a space before it")
        return True

    def _say(self, text: str) -> None:
        """Answer a message. What the model refuses is not kept, so that the conversation can go on."""
        try:
            asked = {"role": "user", "content": utf8_text(text, "the message")}
            output = answer(self.llm, [*self.messages, asked], self.params, quiet=self.as_json)
        except UserError as error:
            self.refused += 1
            note(f"soloist: {error}{TURNED_AWAY}")
            return
        if output.finish_reason == "cancelled":
            self.interrupts = 1
        if output.text:
            self.turns += [asked, {"role": "assistant", "content": output.text}]
        self._report(output)

    def _report(self, output: Output) -> None:
        if self.as_json:
            print(json.dumps({"model": self.llm.config.model, **output.to_dict()}), flush=True)
            return
        note(summary(output, self.llm.plan))
        if not output.text:
            note("there was no text; the message was not kept")
        if output.usage.total_tokens >= self.llm.plan.context_length:
            note("the context is full: /reset forgets the conversation, --context-length N makes room for more")


def typed_lines(conversation: Conversation) -> Iterator[str]:
    """Lines from the keyboard, until Ctrl+D, or Ctrl+C twice since the last line."""
    read = line_reader()
    while True:
        try:
            yield read("> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            conversation.interrupts += 1
            if conversation.interrupts > 1:
                return
            note("\nCtrl+C again leaves")


def piped_lines() -> Iterator[str]:
    for line in sys.stdin.buffer:
        yield line.decode(errors="surrogateescape").rstrip("\r\n")


def line_reader() -> Callable[[str], str]:
    """prompt-toolkit's line editor where it is installed, otherwise `input` with readline."""
    if find_spec("prompt_toolkit") is not None:
        from prompt_toolkit import PromptSession

        session: Any = PromptSession()
        return lambda prompt: str(session.prompt(prompt))
    if find_spec("readline") is not None:
        import readline  # noqa: F401  (importing it gives `input` editing and history)
    return input


def note(text: str) -> None:
    """What is not the model's text goes to stderr."""
    print(text, file=sys.stderr, flush=True)
