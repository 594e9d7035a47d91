"""`soloist chat`: the conversation grows turn by turn, survives what goes wrong, and ends when it is asked to."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from soloist.cli import main
from soloist.cli.answer import VISIBLE, StopKey
from soloist.cli.chat import Conversation
from soloist.config import SamplingParams
from soloist.llm import LLM
from soloist.testing.checkpoints import write_checkpoint

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
FLAGS = ["-n", "8", "--ignore-eos", "--threads", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("model"), "smollm", tokenizer=True, max_position_embeddings=100_000
    )


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(model=str(folder), threads=1) as llm:
        yield llm


def talk(folder: Path, monkeypatch: pytest.MonkeyPatch, lines: str | bytes, *flags: str) -> int:
    """Run a conversation from stdin; returns the exit code."""
    data = lines if isinstance(lines, bytes) else lines.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    return main(["chat", "-m", str(folder), *FLAGS, *flags])


def expected(llm: LLM, *asked: str, system: str | None = None) -> list[tuple[int, list[int]]]:
    """Prompt length and answer of every turn, from the API."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    turns = []
    for text in asked:
        messages.append({"role": "user", "content": text})
        output = llm.generate(messages, PARAMS)
        messages.append({"role": "assistant", "content": output.text})
        turns.append((output.usage.prompt_tokens, output.token_ids))
    return turns


def told(text: str) -> list[tuple[int, list[int]]]:
    records = [json.loads(line) for line in text.splitlines()]
    return [(record["usage"]["prompt_tokens"], record["token_ids"]) for record in records]


def test_every_turn_sees_the_turns_before(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(folder, monkeypatch, "hello\n\nhow are you?\nbye\n", "--json") == 0
    assert told(capsys.readouterr().out) == expected(llm, "hello", "how are you?", "bye")


def test_reset_and_system_shape_what_the_model_sees(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "one\n/reset\n/system Be brief.\ntwo\nthree\n/system\n/reset\nfour\n/exit\nnever\n"
    assert talk(folder, monkeypatch, lines, "--json", "--system", "Be kind.") == 0
    said = capsys.readouterr()
    assert told(said.out) == [
        *expected(llm, "one", system="Be kind."),
        *expected(llm, "two", "three", system="Be brief."),
        *expected(llm, "four"),
    ]
    assert "forgot the conversation" in said.err


def test_answers_go_to_stdout_and_figures_to_stderr(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(folder, monkeypatch, "hello\n") == 0
    said = capsys.readouterr()
    assert said.out == llm.generate([{"role": "user", "content": "hello"}], PARAMS).text + "\n"
    assert "8 tokens | TTFT " in said.err and "length (max_tokens)" in said.err


def test_commands_are_told_from_messages(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(llm, PARAMS, None)
    assert conversation.take("/help") and conversation.take("/nonsense")
    assert conversation.turns == []
    said = capsys.readouterr().err
    assert "/system TEXT" in said and "no command /nonsense" in said
    assert conversation.take("/etc/passwd is what?") and conversation.take(" /nonsense")
    assert [turn["content"] for turn in conversation.turns[::2]] == ["/etc/passwd is what?", "/nonsense"]
    assert not conversation.take("/exit")


def test_a_message_that_does_not_fit_is_refused_and_nothing_is_lost(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    too_long = "too long " * 60
    code = talk(folder, monkeypatch, f"hello\n{too_long}\nagain\n", "--json", "--context-length", "120")
    said = capsys.readouterr()
    assert code == 2 and told(said.out) == expected(llm, "hello", "again")
    assert "the context holds 120" in said.err and "/reset forgets the conversation" in said.err


def test_a_full_context_says_what_to_do(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    room = len(llm.encode([{"role": "user", "content": "hello"}])) + 4
    assert talk(folder, monkeypatch, "hello\n", "--context-length", str(room)) == 0
    assert "the context is full: /reset" in capsys.readouterr().err


def test_a_line_that_is_no_text_is_refused_and_the_talk_goes_on(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(folder, monkeypatch, b"caf\xe9\nhello\n", "--json") == 2
    said = capsys.readouterr()
    assert told(said.out) == expected(llm, "hello") and "not UTF-8" in said.err


def test_a_model_without_template_is_refused_before_the_first_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = write_checkpoint(tmp_path, "qwen3")
    assert talk(plain, monkeypatch, "hello\n") == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1


class Terminal:
    """A chat in a terminal of 24 rows, typed into by the test."""

    def __init__(self, folder: Path, *flags: str):
        self.seen = b""
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
            os.environ |= {"TERM": "xterm", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "soloist", "chat", "-m", str(folder), *flags]
            os.execv(sys.executable, command)
        fcntl.ioctl(self.file, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))

    def wait_for(self, text: bytes, timeout_s: float = 60) -> bytes:
        """Read until the text comes; returns what came, up to and with it."""
        end = time.monotonic() + timeout_s
        while text not in self.seen:
            assert time.monotonic() < end, self.seen
            if select.select([self.file], [], [], 0.1)[0]:
                self.seen += os.read(self.file, 1 << 16)
        came, self.seen = self.seen[: self.seen.index(text) + len(text)], self.seen.partition(text)[2]
        return came

    def type(self, keys: bytes) -> None:
        time.sleep(0.3)  # a line editor that has just shown its prompt is not listening yet
        os.write(self.file, keys)

    def leave_code(self) -> int:
        """Exit code of the chat, which must end by itself."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if select.select([self.file], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.file, 1 << 16)
                except OSError:  # the other side is gone
                    break
        else:
            os.kill(self.pid, signal.SIGKILL)
        os.close(self.file)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


ENDLESS = ["-n", "none", "--ignore-eos"]


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(folder: Path) -> None:
    terminal = Terminal(folder, *ENDLESS)
    terminal.wait_for(b"> ")
    terminal.type(b"hello\r")
    terminal.wait_for(b"tok/s, Ctrl+C stops")
    time.sleep(1)  # a slow machine has written a token or two by now, and the next prompt is to be longer by more
    terminal.type(b"\x03")
    stopped = terminal.wait_for(b"cancelled")
    assert b"\x1b[r" in stopped  # the scrolling region is given back
    first = int(stopped.split(b" prompt tokens")[0].rsplit(b"(", 1)[1])
    terminal.wait_for(b"> ")
    terminal.type(b"again\r")
    terminal.wait_for(b"tok/s, Ctrl+C stops")
    terminal.type(b"\x03")
    second = int(terminal.wait_for(b"cancelled").split(b" prompt tokens")[0].rsplit(b"(", 1)[1])
    assert second > first + 8  # the answer that was stopped is part of the prompt
    terminal.wait_for(b"> ")
    terminal.type(b"\x03")
    assert terminal.leave_code() == 0


def test_the_second_ctrl_c_in_an_answer_does_not_wait_for_the_round(llm: LLM) -> None:
    with StopKey(llm) as key:
        os.kill(os.getpid(), signal.SIGINT)
        assert key.pressed
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)


def test_ctrl_c_at_the_prompt_warns_first_and_ctrl_d_leaves(folder: Path) -> None:
    terminal = Terminal(folder)
    terminal.wait_for(b"> ")
    terminal.type(b"\x03")
    terminal.wait_for(b"Ctrl+C again leaves")
    terminal.wait_for(b"> ")
    terminal.type(b"\x04")
    assert terminal.leave_code() == 0


def test_a_model_cannot_steer_the_terminal() -> None:
    shown = "\x1b]0;title\x07 a\tb\n \x9b2J\x7f".translate(VISIBLE)
    assert shown == "\ufffd]0;title\ufffd a\tb\n \ufffd2J\ufffd"
