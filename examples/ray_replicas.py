"""Many users: replicas of one model behind one address, as a Ray Serve application.

A replica answers one request at a time, as fast as it can; Ray sends each request to the replica with the shortest queue
and starts a new one for each that dies. Needs the extra `ray`:

    pip install "soloist[ray]"
    serve run examples.ray_replicas:build model=nano replicas=2
    curl -N localhost:8000/generate -d '{"prompt": "Once upon a time", "max_tokens": 64}'

The answer is one JSON object a line: {"text": ...} for each round, the last one with `finish_reason` and `usage`. For a
model on several GPUs give tensor_parallel=4 gpus=4: the replica reserves them and its rank 0 starts the others.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any

from ray import serve
from ray.serve import Application
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from soloist import LLM, SamplingParams
from soloist.errors import RankLost, UserError

WAITING = 8
"""Requests that may wait at a replica; Ray's proxy holds back the others."""


@serve.deployment(max_ongoing_requests=WAITING, health_check_period_s=2, health_check_timeout_s=10)
class Replica:
    """One LLM."""

    def __init__(self, settings: dict[str, Any]):
        self._llm, self._lost = LLM(**settings), ""

    async def __call__(self, request: Request) -> Response:
        try:
            asked = json.loads(await request.body())
            if not isinstance(asked, dict) or "prompt" not in asked:
                raise UserError('the body must be {"prompt": ...} with the fields of SamplingParams beside it')
            prompt = asked.pop("prompt")
            events = self._llm.stream(prompt, SamplingParams(**asked))
        except (ValueError, TypeError) as error:
            return JSONResponse({"error": str(error)}, 400)
        return StreamingResponse(self._lines(events), media_type="application/x-ndjson")

    def _lines(self, events: Iterator[Any]) -> Iterator[str]:
        """Starlette runs this in a thread, round by round; a client that goes away closes it, which ends the request."""
        try:
            for event in events:
                line = {"text": event.text, "replica": os.getpid()}
                if event.output is not None:
                    line |= {"finish_reason": event.finish_reason, "usage": dataclasses.asdict(event.output.usage)}
                yield json.dumps(line) + "\n"
        except RankLost as error:
            self._lost = str(error)
            yield json.dumps({"error": self._lost}) + "\n"

    def check_health(self) -> None:
        """Ray calls it now and then, and replaces a replica that raises."""
        if self._lost:
            raise RuntimeError(self._lost)


def build(args: dict[str, str]) -> Application:
    """args: model, replicas, gpus (for each replica), and other settings of LLM, as `serve run` passes them."""
    settings: dict[str, Any] = {name: int(value) if value.isdigit() else value for name, value in args.items()}
    replicas, gpus = settings.pop("replicas", 1), settings.pop("gpus", 0)
    return Replica.options(num_replicas=replicas, ray_actor_options={"num_cpus": 0.1, "num_gpus": gpus}).bind(settings)
