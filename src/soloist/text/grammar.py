"""Grammars that an answer must follow, matched token by token on the host by llguidance.

The grammar sees the tokens as the detokenizer does, so what it lets through is what the reader gets. JSON is written on
one line with the spacing of `json.dumps`: then all punctuation and keys follow from the schema, and drafts of them are
free. A schema may ask for another spacing with its key `x-guidance`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from soloist.errors import UserError
from soloist.text.reasoning import Reasoning
from soloist.text.tokenizer import Tokenizer

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_AFTER_REASONING = {
    Reasoning.OPEN: "start: reasoning @answer",
    Reasoning.OPEN_LINE: "start: reasoning LINES? @answer",
    Reasoning.POSSIBLE: 'start: ("<think>" reasoning LINES?)? @answer',
}
_REASONING = r"""
reasoning[lazy]: /(.|\n)*<\/think>/
LINES: /\n{1,2}/
"""
_COMPILED = 16
"""Grammars kept ready for the next request that has the same."""


class Grammars:
    """What a model's requests may ask of the form of their answers.

    Args: vocab_size: rows of the model's head; eos_token_ids: allowed where a grammar may end.
    Raises: UserError where llguidance is not installed, or the model knows no token that ends a text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        try:
            import llguidance
        except ImportError:
            raise UserError(
                "response_format needs the package llguidance, which is not installed: pip install 'soloist[grammar]'"
            ) from None
        if not eos_token_ids:
            raise UserError("response_format needs a token that ends the text, and the model's files name no eos_token_id")
        self._eos = frozenset(eos_token_ids)
        words = llguidance.TokenizerWrapper(_Words(tokenizer, vocab_size, tuple(eos_token_ids)))
        self._tokenizer = llguidance.LLTokenizer(words, eos_token=list(eos_token_ids))
        assert self._tokenizer.vocab_size == vocab_size, (self._tokenizer.vocab_size, vocab_size)
        self._matcher = llguidance.LLMatcher
        self._fresh = lru_cache(_COMPILED)(self._compile)

    def begin(self, response_format: dict[str, Any], reasoning: Reasoning) -> Grammar:
        """A grammar at its beginning. `response_format`: as SamplingParams accepts it, apart from plain text.

        Raises: UserError for a schema, expression or grammar that is wrong or not supported.
        """
        fresh = self._fresh(json.dumps(response_format), reasoning)
        return Grammar(fresh.deep_copy(), self._eos)

    def _compile(self, response_format: str, reasoning: Reasoning) -> Any:
        asked = json.loads(response_format)
        grammar = self._source(asked)
        if reasoning in _AFTER_REASONING:
            answer = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
            answer[0]["name"] = "answer"
            whole = {"name": "whole", "lark_grammar": _AFTER_REASONING[reasoning] + _REASONING}
            grammar = json.dumps({"grammars": [whole, *answer]})
        matcher = self._matcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise UserError(f"response_format: {asked['type']}: {_one_line(matcher.get_error())}")
        return matcher

    def _source(self, asked: dict[str, Any]) -> str:
        """In llguidance's own form."""
        make = self._matcher
        kind = asked["type"]
        if kind == "regex":
            return make.grammar_from_regex(asked["regex"])
        if kind == "grammar":
            return self._from_grammar(asked["grammar"])
        schema = asked["json_schema"]["schema"] if kind == "json_schema" else {"type": "object"}
        spacing: Any = SPACING
        try:
            return make.grammar_from_json_schema(json.dumps(schema), defaults=spacing)
        except ValueError as error:
            raise UserError(f"response_format: json_schema: {_one_line(str(error))}") from error

    def _from_grammar(self, text: str) -> str:
        from llguidance import grammar_from

        try:
            return grammar_from("grammar", text)
        except ValueError as error:
            raise UserError(f"response_format: grammar: {_one_line(str(error))}") from error


class Grammar:
    """The grammar of one request, at the place behind the last emitted token."""

    def __init__(self, matcher: Any, eos: frozenset[int]):
        self._matcher, self._eos = matcher, eos

    def fill(self, rows: np.ndarray, drafts: Sequence[int]) -> None:
        """Say which tokens may come next after every prefix of the drafts.

        Args: rows [len(drafts) + 1, words] int32, contiguous; see ops/allow.
        Writes: rows, whole. Those behind a draft that may not come, or ends the text, allow everything: no token of
            theirs is emitted.
        """
        matcher, at, words = self._matcher, rows.ctypes.data, rows.shape[1]
        matcher.unsafe_compute_mask_ptr(at, words * 4)
        followed = 0
        for draft in drafts:
            if draft in self._eos or not rows[followed, draft >> 5] >> (draft & 31) & 1:
                break
            matcher.consume_token(draft)
            followed += 1
            matcher.unsafe_compute_mask_ptr(at + followed * words * 4, words * 4)
        rows[followed + 1 :] = -1
        if followed:
            matcher.rollback(followed)
        self._check()

    def advance(self, tokens: Sequence[int]) -> None:
        """Go on behind tokens that were emitted; none of them ends the text."""
        self._matcher.consume_tokens(list(tokens))
        self._check()

    def forced(self) -> list[int]:
        """The tokens that must come next, as far as that is certain; with the one that ends the text, if it does."""
        matcher = self._matcher
        tokens = matcher.compute_ff_tokens()
        followed = matcher.try_consume_tokens(tokens) if tokens else 0
        ends = matcher.is_stopped() and not matcher.is_error()
        if followed:
            matcher.rollback(followed)
        self._check()
        return [*tokens[:followed], *([min(self._eos)] if ends else [])]

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UserError(f"response_format: the grammar cannot be followed here: {_one_line(self._matcher.get_error())}")


class _Words:
    """The vocabulary as llguidance asks for it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]):
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_ids[0]
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = sorted(i for i in tokenizer.special_ids.union(eos_token_ids) if i < vocab_size)

    def __call__(self, text: str) -> list[int]:
        """Token ids of a text that stands in the middle of another."""
        ids = self._tokenizer.encode(text, add_special=False)
        if b"".join(map(self.tokens.__getitem__, ids)) == text.encode():
            return ids
        # SentencePiece puts a space before a text; a control character takes it, and is cut off again.
        ids, read = self._tokenizer.encode("\x02" + text, add_special=False), b""
        while not read.endswith(b"\x02"):
            read += self.tokens[ids.pop(0)]
        return ids


def _one_line(message: str) -> str:
    """llguidance appends its state and the grammar to what it has to say."""
    said = message.split("<state>")[0].split("<grammar>")[0]
    return " ".join(said.split())
