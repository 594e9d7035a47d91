"""Drafters that know the answer, or nothing at all: they pin the acceptance that tests and benchmarks ask for."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from soloist.drafters.drafter import Draw
from soloist.models.decoder import Decoder, Output
from soloist.ops.noise import gumbel, mix
from soloist.state.buffers import Buffers
from soloist.state.sequence import Sequence, Window


class StatelessDrafter:
    """What drafters without state share: nothing to bind, to forget or to observe."""

    taps: tuple[int, ...] = ()
    confidence: torch.Tensor | None = None
    foresees = False
    law: torch.Tensor | None = None

    def __init__(self, name: str, width: int):
        self.name, self.width = name, width

    def bind(self, model: Decoder, sequence: Sequence, bufs: Buffers) -> None:
        pass

    def reset(self) -> None:
        pass

    def observe(self, out: Output, following: torch.Tensor, n: torch.Tensor) -> None:
        pass


class KnowingDrafter(StatelessDrafter):
    """Knows the ids that plain decoding emits. Proposes the id of output index i where right[i mod len(right)] is true,
    otherwise the next one of the vocabulary, which is wrong.
    """

    def __init__(self, name: str, answer: Items[int], right: Items[bool], width: int, vocab_size: int):
        super().__init__(name, width)
        shift = [not right[i % len(right)] for i in range(len(answer))]
        self._ids = torch.tensor([(token + off) % vocab_size for token, off in zip(answer, shift, strict=True)])

    def propose(self, bufs: Buffers, window: Window, draw: Draw) -> torch.Tensor:
        places = bufs.emitted + torch.arange(window.width)
        return self._ids[places.clamp_max(len(self._ids) - 1)]


def oracle(answer: Items[int], width: int, vocab_size: int) -> KnowingDrafter:
    """Always right: every draft must be accepted."""
    return KnowingDrafter("oracle", answer, (True,), width, vocab_size)


def always_wrong(answer: Items[int], width: int, vocab_size: int) -> KnowingDrafter:
    """Never right: every round must emit one token."""
    return KnowingDrafter("wrong", answer, (False,), width, vocab_size)


def mixed(answer: Items[int], right: Items[bool], width: int, vocab_size: int) -> KnowingDrafter:
    """Right by a pattern over the output's indices."""
    return KnowingDrafter("mixed", answer, right, width, vocab_size)


class RandomDrafter(StatelessDrafter):
    """Ids that have nothing to do with the text, the same ones in every run."""

    def __init__(self, width: int, vocab_size: int):
        super().__init__("random", width)
        self._vocab_size = vocab_size

    def propose(self, bufs: Buffers, window: Window, draw: Draw) -> torch.Tensor:
        return mix(bufs.emitted * 16 + torch.arange(window.width)) % self._vocab_size


class BigramDrafter(StatelessDrafter):
    """Draws each draft from a table's row of the token before it, with noise of its own, and tells the law.

    table [V, V]: logits of the next token, a row for each token.
    """

    NOISE = 0x5EED_D4AF

    def __init__(self, table: torch.Tensor, width: int):
        super().__init__("bigram", width)
        self._laws = torch.softmax(table, -1)

    def propose(self, bufs: Buffers, window: Window, draw: Draw) -> torch.Tensor:
        noise = gumbel(bufs.emitted + torch.arange(window.width), bufs.seed ^ self.NOISE, len(self._laws))
        token, tokens, laws = bufs.anchor, [], []
        for row in noise:
            laws.append(self._laws[token])
            token = (laws[-1].log() + row).argmax(-1)
            tokens.append(token)
        self.law = torch.cat(laws)
        return torch.cat(tokens)
