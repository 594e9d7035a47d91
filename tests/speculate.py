"""Engines over small random models with any drafter, and the plain answers to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from soloist.config import MAX_WINDOW, SamplingParams
from soloist.dist.vocabulary import Logits
from soloist.drafters.drafter import Drafter, Draw, NoDraft
from soloist.drafters.ngram import NgramDrafter
from soloist.drafters.scripted import ScriptedDrafter
from soloist.drafters.width import FixedWidth, Told, WidthChoice
from soloist.runtime.engine import Engine, Request
from soloist.runtime.prefill import prefill
from soloist.runtime.round import Parts, RoundOutput, decode_round
from soloist.runtime.runner import RoundResult
from soloist.runtime.sampler import Sampler
from soloist.state.buffers import Buffers
from soloist.state.sequence import Sequence as State
from soloist.state.sequence import Window
from soloist.testing.drafters import RandomDrafter, always_wrong, mixed, oracle
from tests import models

V, CONTEXT = 101, 256
PROMPT = tuple(models.ids(23).tolist())
PATTERN = (True, True, False, True, False, False, True, True, True, True, False)

Make = Callable[[Sequence[int], int], Drafter]
DRAFTERS: dict[str, Make] = {
    "ngram": lambda answer, width: NgramDrafter(width),
    "scripted": lambda answer, width: ScriptedDrafter(tuple(answer[:20]), width),
    "oracle": lambda answer, width: oracle(answer, width, V),
    "wrong": lambda answer, width: always_wrong(answer, width, V),
    "mixed": lambda answer, width: mixed(answer, PATTERN, width, V),
    "random": lambda answer, width: RandomDrafter(width, V),
}


class Cheap(FixedWidth):
    """Always drafts the same; a round verifies what its drafter is sure of."""

    adapts = True

    def tell(self) -> Told:
        return [1.0 + 0.1 * width for width in range(self.width + 1)], [1.0] * self.width, 1.0


def engine(
    kind: str,
    drafter: Drafter,
    widths: WidthChoice | None = None,
    rejection: bool = False,
    chunk: int = 512,
    prefix_cache_bytes: int = 0,
) -> Engine:
    model = models.decoder(kind)
    state = State(model.cache_specs(), CONTEXT, MAX_WINDOW, torch.device("cpu"))
    bufs = Buffers(V, CONTEXT + MAX_WINDOW + 1, torch.device("cpu"))
    widths, parts = widths or FixedWidth(drafter.width), Parts(model, state, bufs, drafter)
    return Engine(parts, V, chunk, widths, rejection, prefix_cache_bytes)


def run(
    served: Engine, params: SamplingParams, prompt: tuple[int, ...] = PROMPT, eos: tuple[int, ...] = ()
) -> list[RoundResult]:
    """The results of a request: the prefill's, then the rounds'."""
    return [result for result in served.run(Request(prompt, eos, params)) if result is not None]


def tokens(results: list[RoundResult]) -> list[int]:
    return [token for result in results for token in result.tokens]


@cache
def plain_engine(kind: str) -> Engine:
    return engine(kind, NoDraft())


def plain(kind: str, params: SamplingParams, prompt: tuple[int, ...] = PROMPT, eos: tuple[int, ...] = ()) -> list[int]:
    """What plain decoding answers."""
    return tokens(run(plain_engine(kind), params, prompt, eos))


def argmax(logits: Logits, places: torch.Tensor) -> tuple[torch.Tensor, None]:
    """The greedy Draw."""
    return logits.whole.argmax(-1), None


def proposal(served: Engine, width: int, drafter: Drafter | None = None, draw: Draw = argmax) -> list[int]:
    """What a drafter, the engine's own if none is given, would propose now."""
    state = served.parts.sequence
    with torch.inference_mode():
        window = state.window(width + 1, int(state.length) + width + 1)
        return (drafter or served.parts.drafter).propose(served.parts.bufs, window, draw).tolist()


class Steered:
    """Lets a drafter draft in earnest, and proposes the known answer where PATTERN says so: rounds of every acceptance.

    proposed: what the drafter itself proposed, round by round.
    """

    def __init__(self, inner: Drafter, answer: Sequence[int]):
        self.inner, self.proposed = inner, list[list[int]]()
        self.name, self.width, self.taps, self.law = inner.name, inner.width, inner.taps, None
        self.foresees = inner.foresees
        self._known = mixed(answer, PATTERN, inner.width, V)
        self.bind, self.reset, self.observe = inner.bind, inner.reset, inner.observe

    @property
    def confidence(self) -> torch.Tensor | None:
        return self.inner.confidence

    def propose(self, bufs: Buffers, window: Window, draw: Draw) -> torch.Tensor:
        self.proposed.append(self.inner.propose(bufs, window, draw).tolist())
        return self._known.propose(bufs, window, draw)


class Driven:
    """An engine driven by hand: prefill at once, then round by round, of any width, with every row committed."""

    def __init__(self, served: Engine, params: SamplingParams, prompt: tuple[int, ...]):
        self.served, self.text = served, list(prompt)
        parts, ids = served.parts, torch.tensor(prompt)
        with torch.inference_mode():
            served.prefixes.begin(prompt)
            parts.bufs.start(ids, CONTEXT, (), params.seed or 0)
            parts.drafter.reset()
            self._sampler = Sampler(params, parts.bufs, served.rejection)
            for output in prefill(parts, self._sampler, ids, served.prefill_chunk, served.prefixes):
                self._take(output)

    def round(self, width: int) -> int:
        """Tokens emitted."""
        with torch.inference_mode():
            bound = int(self.served.parts.sequence.length) + width + 1
            return self._take(decode_round(self.served.parts, self._sampler, bound, width))

    def _take(self, output: RoundOutput | None) -> int:
        if output is None:
            return 0
        n, _, _, *picks = output.report.tolist()
        self.text += picks[:n]
        return int(n)


def watch(
    drafting: Drafter, fresh: Drafter, build: Callable[[Drafter], Engine], params: SamplingParams,
    prompt: tuple[int, ...], rounds: int = 7,
) -> list[tuple[int, list[int], list[int]]]:
    """Run a drafter under mixed acceptance beside a fresh one of its kind that is fed the same text token by token.

    Returns: after every round (tokens it emitted, what the first proposes now, what the second proposes now).
    """
    straight = Driven(build(NoDraft()), params, prompt)
    while len(straight.text) < len(prompt) + (drafting.width + 1) * rounds:
        straight.round(0)
    first = Driven(build(Steered(drafting, straight.text[len(prompt) :])), params, prompt)
    second = Driven(build(fresh), params, prompt)
    found, width = [], drafting.width
    for _ in range(rounds):
        emitted = first.round(width)
        for _ in range(emitted):
            second.round(0)
        assert first.text == second.text == straight.text[: len(first.text)]
        found.append((emitted, proposal(first.served, width, drafting), proposal(second.served, width)))
    return found
