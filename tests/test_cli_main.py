"""The command line as a whole: commands, exit codes, one clear line for every mistake, quick help, frozen flags."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import soloist
from soloist.cli import COMMANDS, main
from soloist.cli.flags import Parser, engine, flag, given, sampling
from soloist.cli.prompt import utf8_text
from soloist.config import EngineConfig, SamplingParams

ENGINE_FLAGS = (
    "--acceptance --context-length --device --draft-width --drafter --drafter-path --dtype --model --prefill-chunk "
    "--prefix-cache-bytes --tensor-parallel --threads --tp-rank-of -m"
).split()
SAMPLING_FLAGS = (
    "--frequency-penalty --ignore-eos --logit-bias --logprobs --max-tokens --min-p --min-tokens --no-ignore-eos "
    "--presence-penalty --repetition-penalty --response-format --seed --stop --stop-token-ids --temperature --top-k "
    "--top-p -n"
).split()
ALWAYS = ["--help", "--json", "-h"]
PROMPT_FLAGS = ["--chat", "--prompt", "--prompt-file", "--prompt-ids", "--raw", "--system", "-p"]
SERVER_FLAGS = (
    "--api-key --cors-origin --drain-timeout --host --log-text --max-queue --max-request-bytes --no-log-text --port "
    "--request-timeout --served-name"
).split()
SHAPE_FLAGS = ["--grammar", "--grammar-file", "--json-schema", "--json-schema-file", "--regex"]
FROZEN = {
    "generate": [*ALWAYS, *ENGINE_FLAGS, *SAMPLING_FLAGS, *PROMPT_FLAGS, *SHAPE_FLAGS, "--compare"],
    "chat": [*ALWAYS, *ENGINE_FLAGS, *SAMPLING_FLAGS, "--system"],
    "explain": [*ALWAYS, *ENGINE_FLAGS],
    "profile": [*ALWAYS, *ENGINE_FLAGS, "--context", "--rounds", "--rows", "--trace"],
    "serve": ["--help", "-h", *ENGINE_FLAGS, *SERVER_FLAGS],
    "bench": ["--help", "-h"],
    "doctor": [*ALWAYS, "--model", "-m"],
    "version": ALWAYS,
}
"""Scripts rely on these: a flag may be added here, and none may go without a word in the changelog."""

OWN = sorted(FROZEN)


def parser_of(command: str) -> Parser:
    module = import_module(f"soloist.cli.{command}")
    parser = Parser(f"soloist {command}", str(module.__doc__))
    module.add_flags(parser)
    return parser


@pytest.mark.parametrize("command", OWN)
def test_flags_are_frozen(command: str) -> None:
    assert sorted(parser_of(command)._option_string_actions) == sorted(FROZEN[command])


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_every_field_of_engine_and_request_is_a_flag(command: str) -> None:
    flags = parser_of(command)._option_string_actions
    for field in (*dataclasses.fields(EngineConfig), *dataclasses.fields(SamplingParams)):
        assert flag(field.name) in flags


def test_flags_arrive_as_the_values_they_name() -> None:
    words = (
        "-m folder --drafter ngram --draft-width 3 --threads none --context-length 64 --temperature 0.5 --top-k 7 "
        "--seed 5 -n 9 --stop A --stop B --stop-token-ids 4,5 --logit-bias 3:-1.5,4:2 --ignore-eos --logprobs none"
    )
    args = parser_of("generate").parse_args(words.split())
    assert engine(args) == {
        "model": "folder", "drafter": "ngram", "draft_width": 3, "threads": None, "context_length": 64,
    }  # fmt: skip
    assert sampling(args) == SamplingParams(
        temperature=0.5, top_k=7, seed=5, max_tokens=9, stop=("A", "B"), stop_token_ids=(4, 5),
        logit_bias={3: -1.5, 4: 2.0}, ignore_eos=True, logprobs=None,
    )  # fmt: skip


def test_what_is_not_given_is_left_to_the_engine() -> None:
    args = parser_of("generate").parse_args(["-m", "folder"])
    assert given(args, EngineConfig) == {"model": "folder"}
    assert sampling(args) == SamplingParams(temperature=0.0, max_tokens=256)
    assert sampling(parser_of("chat").parse_args([])) == SamplingParams(temperature=0.0, max_tokens=1024)


def test_flags_without_effect_are_announced(capsys: pytest.CaptureFixture[str]) -> None:
    sampling(parser_of("generate").parse_args(["--top-p", "0.5", "--seed", "1"]))
    assert capsys.readouterr().err == "soloist: --top-p, --seed changes nothing at temperature 0; add --temperature 1\n"
    sampling(parser_of("generate").parse_args(["--top-p", "0.5", "--temperature", "1"]))
    assert capsys.readouterr().err == ""


BAD = {
    "genrate": "did you mean generate?",
    "qqq": "commands are generate, chat",
    "--model x generate": "stands before the command",
    "generate -m x hi --temprature 1": "did you mean --temperature?",
    "generate -m x two words": "quotes",
    "generate -m x hi --top-k many": "'many' is not a whole number",
    "generate -m x hi --temperature -1": "temperature=-1.0",
    "generate -m x hi --draft-width 99 --drafter ngram": "draft_width=99",
    "generate -m x hi --drafter magic": "drafter='magic'",
    "generate -m x hi --stop": "expected one argument",
    "generate -m x hi --prompt ho": "TEXT and --prompt were given together",
    "generate -m x": "no prompt; give one of",
    "generate -m x hi --raw --chat": "not allowed with",
    "generate -m x hi --raw --system s": "--system is part of a chat",
    "generate -m x --prompt-ids 1,a": "'1,a' is not a list of token ids",
    "generate -m x --prompt-ids 1 --chat": "--chat needs text",
    "generate -m x --prompt-file /nowhere.txt": "no such file",
    "generate -m x hi --logprobs 2": "add --json",
    "generate -m x hi --compare": "choose one with --drafter",
    "generate -m /nowhere hi": "/nowhere",
    "chat -m /nowhere": "/nowhere",
    "explain -m /nowhere": "/nowhere",
    "doctor -m /nowhere": "/nowhere",
    "version now": "unrecognized arguments: now",
}


@pytest.mark.parametrize("line", BAD)
def test_a_mistake_is_one_line_on_stderr_and_code_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("soloist: ") and said.err.count("\n") == 1 and BAD[line] in said.err


def test_bytes_that_are_no_text_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-m", "x", b"caf\xe9".decode(errors="surrogateescape")]) == 2
    assert "not UTF-8" in capsys.readouterr().err


def test_a_prompt_is_read_in_an_ascii_locale_too() -> None:
    assert utf8_text("Grüße".encode().decode("ascii", errors="surrogateescape"), "the prompt") == "Grüße"


def test_only_words_that_no_flag_takes_are_told_of_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    for line, told in (("hi there", True), ("hi --top-k many", False), ("hi --stop", False), ("hi --rawer", False)):
        assert main(["generate", "-m", "x", *line.split()]) == 2
        assert ("quotes" in capsys.readouterr().err) is told, line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")
def test_a_full_disk_is_one_line_and_code_1() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "soloist", "version"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr.startswith("soloist: ") and done.stderr.count("\n") == 1


def test_a_command_runs_with_its_streams_closed() -> None:
    for closed, told in (("<&- >&-", ""), ("<&- 2>&-", f"soloist {soloist.__version__}\n")):
        line = f'"{sys.executable}" -m soloist --version {closed}'
        done = subprocess.run(line, shell=True, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, told, "")


def test_no_command_shows_the_commands_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr()
    assert said.out == "" and all(name in said.err for name in COMMANDS)


@pytest.mark.parametrize("command", ["", *OWN])
def test_help_goes_to_stdout(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("usage: soloist") and said.err == ""
    assert max(map(len, said.out.splitlines())) <= 120


QUICK = (
    "--help", "generate --help", "chat --help", "version", "version --json", "doctor -h", "bench -h", "bench run -h"
)  # fmt: skip


@pytest.mark.parametrize("line", QUICK)
def test_help_and_version_are_quick_and_leave_torch_alone(line: str) -> None:
    """Quick in time of the processor, which other processes do not change."""
    code = (
        "import sys, soloist.cli as cli; code = cli.main(sys.argv[1:]); "
        "sys.exit(code or ('torch' in sys.modules and 'torch was imported') or 0)"
    )
    times = []
    for _ in range(3):
        before = os.times()
        subprocess.run([sys.executable, "-c", code, *line.split()], check=True, capture_output=True)
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
        if times[-1] < 0.3:
            return
    assert min(times) < 0.3, times


def test_version_names_what_soloist_stands_on(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    assert main(["version", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"soloist", "python", "torch", "triton", "cuda", "system"}
    assert found["soloist"] == soloist.__version__
    assert found["python"] == sys.version.split()[0]
    assert found["torch"] == torch.__version__
    assert found["cuda"] == torch.version.cuda
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"soloist {soloist.__version__}\n"


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "soloist", "nothing"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("soloist: no command 'nothing'")
