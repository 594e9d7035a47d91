"""`soloist generate`: the text on stdout, how it went on stderr, one JSON object, a second run to compare, Ctrl+C."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from soloist.cli import main
from soloist.config import SamplingParams
from soloist.llm import LLM
from soloist.testing.checkpoints import write_checkpoint

PROMPT = "The train leaves at"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SHORT = ["-n", "12", "--ignore-eos", "--threads", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), "smollm", tokenizer=True)


@pytest.fixture(scope="module")
def wordless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("wordless"), "qwen3")


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can be interrupted: its context takes a while to fill."""
    return write_checkpoint(
        tmp_path_factory.mktemp("long"), "smollm", tokenizer=True, max_position_embeddings=100_000
    )


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(model=str(folder), threads=1) as llm:
        yield llm


def test_text_is_that_of_the_api_and_the_line_below_says_how_it_went(
    folder: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = llm.generate(PROMPT, GREEDY)
    assert main(["generate", "-m", str(folder), PROMPT, *SHORT]) == 0
    said = capsys.readouterr()
    assert said.out == expected.text + ("" if expected.text.endswith("\n") else "\n")
    assert said.err.count("\n") == 1
    for part in ("12 tokens | TTFT ", f"({expected.usage.prompt_tokens} prompt tokens)", " ms per token", " tok/s",
                 "length (max_tokens)"):  # fmt: skip
        assert part in said.err
    assert "acceptance" not in said.err


def test_json_is_the_output_and_the_plan_and_nothing_else(
    folder: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "-m", str(folder), PROMPT, *SHORT, "--json", "--logprobs", "2"]) == 0
    said = capsys.readouterr()
    record = json.loads(said.out)
    expected = llm.generate(PROMPT, GREEDY)
    assert set(record) == {*expected.to_dict(), "model", "plan"}
    assert record["token_ids"] == expected.token_ids and record["text"] == expected.text
    assert [token["token_id"] for token in record["logprobs"]] == expected.token_ids
    assert record["model"] == str(folder)
    assert record["plan"]["threads"] == 1 and record["plan"]["dtype"] == "float32"
    assert said.err == ""


def test_every_way_to_give_a_prompt_gives_the_same_answer(
    folder: Path, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n")
    ids = ",".join(map(str, llm.encode(PROMPT)))
    ways = [[PROMPT], ["-p", PROMPT], ["--prompt-file", str(file)], ["--prompt-ids", ids], ["-"]]
    answers = []
    for way in ways:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{PROMPT}\n".encode())))
        assert main(["generate", "-m", str(folder), *way, *SHORT]) == 0
        answers.append(capsys.readouterr().out)
    assert set(answers) == {answers[0]}
    assert main(["generate", "-m", str(folder), PROMPT + "\n", *SHORT]) == 0
    assert capsys.readouterr().out != answers[0]  # only a file's or stdin's last line break is dropped


def test_chat_sends_the_prompt_through_the_template(
    folder: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    for flags, sent in ((["--chat"], messages[1:]), (["--system", "Be brief."], messages)):
        assert main(["generate", "-m", str(folder), PROMPT, *flags, *SHORT, "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["token_ids"] == llm.generate(sent, GREEDY).token_ids
        assert record["usage"]["prompt_tokens"] == len(llm.encode(sent)) > len(llm.encode(PROMPT))


def test_a_model_without_tokenizer_takes_and_shows_ids(wordless: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-m", str(wordless), "--prompt-ids", "1,2,3", *SHORT]) == 0
    shown = [int(word) for word in capsys.readouterr().out.split()]
    with LLM(model=str(wordless), threads=1) as llm:
        assert shown == llm.generate([1, 2, 3], GREEDY).token_ids


def test_compare_says_whether_drafting_pays_and_changes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["generate", "-m", str(folder), PROMPT, *SHORT, "--drafter", "ngram", "--draft-width", "3", "--compare"]
    assert main(line) == 0
    said = capsys.readouterr()
    assert "acceptance length " in said.err and "drafter ngram: " in said.err and "x plain" in said.err
    assert "same text" in said.err
    assert main([*line, "--json", "--temperature", "1"]) == 0  # the two runs must share a seed
    compared = json.loads(capsys.readouterr().out)["compare"]
    assert compared["identical"] is True and compared["speedup"] > 0 and compared["plain_tpot_ms"] > 0


def test_compare_fails_if_the_text_differs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The negative control: plain rounds of another model stand in for a drafter that changes the text."""
    other = LLM(model=str(write_checkpoint(tmp_path, "smollm", tokenizer=True, seed=1)), threads=1)
    monkeypatch.setattr(LLM, "plain", lambda self: other)
    line = ["generate", "-m", str(folder), PROMPT, *SHORT, "--drafter", "ngram", "--compare"]
    assert main(line) == 1
    assert "DIFFERENT TEXT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--prompt-ids", "1,99999"], "99999"),
        (["--prompt-ids", ""], "empty"),
        (["--prompt-ids", "1,2,3", "--context-length", "3"], "the context holds 3"),
        (["hello", "--context-length", "999999"], "context_length=999999"),
        (["hello", "--device", "tpu"], "device='tpu'"),
    ],
)
def test_what_the_model_refuses_is_one_line_and_code_2(
    folder: Path, flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "-m", str(folder), *flags]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and complaint in said.err


def test_text_for_a_model_without_tokenizer_is_refused(wordless: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-m", str(wordless), "hello"]) == 2
    assert "token ids" in capsys.readouterr().err


def test_the_reason_of_the_end_is_told(folder: Path, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    third = llm.generate(PROMPT, GREEDY).token_ids[2]
    for flags, reason in (
        (["--stop-token-ids", str(third)], f"stop (id {third})"),
        (["--context-length", str(len(llm.encode(PROMPT)) + 5)], "is full)"),
    ):
        assert main(["generate", "-m", str(folder), PROMPT, *SHORT, *flags]) == 0
        assert capsys.readouterr().err.strip().endswith(reason)


def start(long: Path, *flags: str) -> subprocess.Popen[bytes]:
    """A request that runs until it is interrupted."""
    command = [sys.executable, "-m", "soloist", "generate", "-m", str(long), PROMPT, "-n", "none", "--ignore-eos"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, bufsize=0
    )


def read_some(process: subprocess.Popen[bytes]) -> None:
    """Wait until part of the answer has come."""
    assert process.stdout is not None
    got = b""
    while len(got) < 40:
        piece = process.stdout.read(40)
        assert piece, process.communicate()
        got += piece


def test_interrupt_ends_the_answer_and_reports_it(long: Path) -> None:
    process = start(long)
    read_some(process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in said and said.strip().endswith(b"cancelled") and b" tok/s" in said


def test_interrupt_keeps_the_json_whole(long: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        while signal.getsignal(signal.SIGINT) is usual:
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    finger = threading.Thread(target=interrupt)
    finger.start()
    line = ["generate", "-m", str(long), PROMPT, "-n", "none", "--ignore-eos", "--threads", "1", "--json"]
    assert main(line) == 130
    finger.join()
    assert json.loads(capsys.readouterr().out)["finish_reason"] == "cancelled"
    assert signal.getsignal(signal.SIGINT) is usual


def test_two_interrupts_leave_at_once(long: Path) -> None:
    process = start(long)
    read_some(process)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in said


def test_a_terminal_that_lacks_a_letter_shows_another(folder: Path) -> None:
    command = [sys.executable, "-m", "soloist", "generate", "-m", str(folder), PROMPT, "-n", "60", "--ignore-eos"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment)
    assert done.returncode == 0 and done.stdout.isascii() and b"?" in done.stdout


def test_text_and_report_keep_their_order_in_one_file(folder: Path) -> None:
    command = [sys.executable, "-m", "soloist", "generate", "-m", str(folder), PROMPT, *SHORT]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=buffered, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("12 tokens | ")


def test_a_reader_that_goes_away_ends_the_program_quietly(long: Path) -> None:
    process = start(long)
    read_some(process)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait(timeout=60) == 141 and said == b""
    process.stderr.close()
