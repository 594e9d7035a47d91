"""Serve a model with OpenAI's API, one request at a time; the others wait their turn.

    soloist serve --model smollm2 --drafter ngram
    curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Hello"}]}'

A page to chat with it is at http://127.0.0.1:8000/. At SIGTERM or Ctrl+C the running request may go on for the drain
timeout; a second one ends the server at once.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any

from soloist.cli.flags import add_engine_flags, add_fields, engine, given
from soloist.config import environment_api_keys
from soloist.dist.place import is_follower
from soloist.errors import UserError
from soloist.server.settings import ServerSettings

HELP = {
    "host": "where to listen, 0.0.0.0 = on every network",
    "port": "where to listen, 0 = any free port",
    "served_name": "the model's name for clients, none = as in --model",
    "api_key": "take only requests with this key; may be repeated; SOLOIST_API_KEY adds more, separated by commas",
    "cors_origin": "let pages of this origin use the server, * = of any; may be repeated",
    "max_queue": "requests that may wait behind the running one; those beyond get a 503",
    "request_timeout": "seconds a request may take, its wait included, 0 = no limit",
    "drain_timeout": "seconds that the running request may go on for when the server is told to end",
    "max_request_bytes": "largest body of a request",
    "log_text": "write prompts and answers into the log, too",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_fields(parser.add_argument_group("server"), ServerSettings, HELP, {})
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    missing = [name for name in ("msgspec", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UserError(f"soloist serve needs {' and '.join(missing)}; install with: pip install 'soloist[serve]'")
    chosen: dict[str, Any] = given(args, ServerSettings)
    settings = ServerSettings(**{**chosen, "api_key": (*chosen.get("api_key", ()), *environment_api_keys())})
    config = engine(args)
    if is_follower(config.get("tensor_parallel", 1)):  # under torchrun; rank 0 has the port
        from soloist.llm import LLM

        LLM(**config)

    from soloist.server.run import serve

    return serve(settings, config)
