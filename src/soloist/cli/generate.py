"""Answer one prompt. The text goes to stdout as it comes; then a line on stderr says how fast and why it ended.

The prompt is continued as it stands; --chat sends it as a user's message through the model's chat template instead.

    soloist generate -m smollm2 "The capital of France is"
    soloist generate -m smollm2 --chat "What is the capital of France?"
    soloist generate -m MODEL_FOLDER --prompt-file notes.txt --drafter ngram --compare
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import secrets
import sys
from typing import TYPE_CHECKING, Any

from soloist.cli.answer import answer, summary
from soloist.cli.flags import add_engine_flags, add_json_flag, add_sampling_flags, engine, sampling
from soloist.cli.prompt import add_prompt_flags, read_prompt
from soloist.cli.shape import add_shape_flags, read_shape
from soloist.config import SamplingParams
from soloist.errors import UserError

if TYPE_CHECKING:
    from soloist.llm import LLM, Output, Prompt

WARM_UP = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s TEXT [FLAGS]"
    add_prompt_flags(parser)
    add_shape_flags(parser)
    parser.add_argument(
        "--compare",
        action="store_true",
        help="run the request once more without the drafter; print the speed-up, and whether the text is the same",
    )
    add_json_flag(parser)
    add_engine_flags(parser)
    add_sampling_flags(parser)


def run(args: argparse.Namespace) -> int:
    settings, params, prompt, shape = engine(args), sampling(args), read_prompt(args), read_shape(args)
    if shape is not None:
        params = dataclasses.replace(params, response_format=shape)
    if params.logprobs is not None and not args.json:
        raise UserError("--logprobs are reported in JSON only; add --json")
    if args.compare:
        if settings.get("drafter", "none") == "none":
            raise UserError("--compare sets a drafter against plain decoding; choose one with --drafter")
        if not params.greedy and params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbits(63))

    from soloist.llm import LLM

    with LLM(progress=True, **settings) as llm:
        if args.compare:
            llm.generate(llm.encode(prompt)[:16], WARM_UP)
        output = answer(llm, prompt, params, quiet=args.json)
        if not args.json:
            print(summary(output, llm.plan), file=sys.stderr)
            if llm.plan.drafter != "none" and output.timings.speedup is None and not args.compare:
                print("no plain round ran to compare with; --compare measures the speed-up", file=sys.stderr)
        compared = None
        if args.compare and output.finish_reason != "cancelled":
            compared = compare(llm, prompt, params, output)
        report(llm, output, compared, args.json)
    if output.finish_reason == "cancelled":
        return 130
    broken = compared is not None and not compared["identical"] and settings.get("acceptance") != "rejection"
    return 1 if broken else 0


def compare(llm: LLM, prompt: Prompt, params: SamplingParams, output: Output) -> dict[str, Any]:
    """The same request in plain rounds on the same model: speed-up of a token after the first, and whether ids agree.

    Raises: KeyboardInterrupt if it is cancelled.
    """
    plain = answer(llm.plain(), prompt, params, quiet=True)
    if plain.finish_reason == "cancelled":
        raise KeyboardInterrupt
    own_ms, plain_ms = output.timings.tpot_ms, plain.timings.tpot_ms
    return {
        "plain_tpot_ms": plain_ms,
        "plain_ttft_ms": plain.timings.ttft_ms,
        "speedup": plain_ms / own_ms if own_ms and plain_ms else None,
        "identical": plain.token_ids == output.token_ids,
    }


def report(llm: LLM, output: Output, compared: dict[str, Any] | None, as_json: bool) -> None:
    """The JSON object on stdout, or the comparison in words on stderr."""
    if as_json:
        extra = {} if compared is None else {"compare": compared}
        record = {"model": llm.config.model, **output.to_dict(), **extra, "plan": dataclasses.asdict(llm.plan)}
        print(json.dumps(record))
    elif compared is not None:
        same = "same text" if compared["identical"] else "DIFFERENT TEXT"
        speed = "too short to time" if compared["speedup"] is None else f"{compared['speedup']:.2f}x plain"
        plain = "" if compared["speedup"] is None else f" ({compared['plain_tpot_ms']:.2f} ms per token)"
        print(f"drafter {llm.plan.drafter}: {speed}{plain}, {same}", file=sys.stderr)
