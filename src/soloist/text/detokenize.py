"""Text from tokens that arrive one by one.

Every token stands for bytes that do not depend on its neighbours, apart from a space dropped at the very beginning.
So a stream is a byte string decoded as UTF-8 while it grows: characters appear when their last byte does, each token
costs its own length, and no window of earlier tokens is decoded again.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer as Vocabulary

from soloist.errors import UserError

Piece = str | bytes
Step = Callable[[Piece], Piece]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ONE_PER_BYTE = "soloist.one_per_byte"
codecs.register_error(_ONE_PER_BYTE, lambda e: ("\ufffd" * (e.end - e.start), e.end))  # type: ignore[attr-defined]


class Detokenizer:
    """Turns the tokens of one text into characters.

    The increments and `flush()` together are the text, however the tokens were cut into blocks. Special tokens are
    skipped if so asked, and so are ids without a token, since heads are often padded beyond the vocabulary.
    """

    def __init__(self, pieces: Pieces, skip_special: bool = True):
        self._pieces, self._skip_special = pieces, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(pieces.rule.invalid_bytes)
        self._droppable = pieces.rule.leading
        self._first = True

    def push(self, token: int) -> str:
        """The characters that this token completes."""
        piece = self._pieces.of(token, self._first, self._skip_special)
        if piece is None:
            return ""
        self._first = False
        return self._without_leading(self._utf8.decode(piece))

    def flush(self) -> str:
        """The rest: bytes that no token can complete any more."""
        return self._without_leading(self._utf8.decode(b"", final=True))

    def _without_leading(self, text: str) -> str:
        while text and self._droppable:
            if text[0] != self._droppable[0]:
                self._droppable = ""
                break
            text, self._droppable = text[1:], self._droppable[1:]
        return text


class Pieces:
    """The bytes of each token, worked out when it first appears.   Raises: UserError for a decoder of unknown kind."""

    def __init__(self, vocabulary: Vocabulary, origin: str):
        self.rule = _read_rule(vocabulary, origin)
        self._vocabulary = vocabulary
        self._special = {i for i, added in vocabulary.get_added_tokens_decoder().items() if added.special}
        self._known: dict[tuple[int, bool], bytes | None] = {}

    def of(self, token: int, first: bool, skip_special: bool) -> bytes | None:
        """None for a token that is no part of the text. `first`: no part came before."""
        if skip_special and token in self._special:
            return None
        key = token, first
        if key not in self._known:
            text = self._vocabulary.id_to_token(token) if 0 <= token < 1 << 32 else None
            self._known[key] = None if text is None else self.rule.bytes_of(text, first)
        return self._known[key]


@dataclass
class _Rule:
    """What a decoder does to each token (`steps`), and also to the first of all (`first`) or to all others (`later`).

    leading: characters dropped where the whole text begins with them. invalid_bytes: the error handler of UTF-8.
    """

    steps: list[Step] = field(default_factory=list)
    first: list[Step] = field(default_factory=list)
    later: list[Step] = field(default_factory=list)
    leading: str = ""
    invalid_bytes: str = "replace"

    def bytes_of(self, token: str, first: bool) -> bytes:
        piece: Piece = token
        for step in [*(self.first if first else self.later), *self.steps]:
            piece = step(piece)
        return piece.encode() if isinstance(piece, str) else piece


def _read_rule(vocabulary: Vocabulary, origin: str) -> _Rule:
    rule = _Rule()
    if vocabulary.decoder is None:
        rule.later.append(lambda piece: b" " + _as_bytes(piece))
        return rule
    fused = False
    for settings in _flat(json.loads(vocabulary.decoder.__getstate__())):
        kind = settings["type"]
        if kind == "Fuse":
            fused = True
        elif not _add(rule, kind, settings, fused):
            raise UserError(
                f"{origin}: its decoder has the step {json.dumps(settings)}, which cannot be done token by token; "
                "supported are byte-level and SentencePiece decoders"
            )
    return rule


def _flat(settings: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if settings["type"] != "Sequence":
        return [settings]
    return [step for part in settings["decoders"] for step in _flat(part)]


def _add(rule: _Rule, kind: str, settings: dict[str, Any], fused: bool) -> bool:
    """Whether the step is one that we can do."""
    if kind == "ByteLevel" and not fused:
        rule.steps.append(_from_byte_letters)
    elif kind == "ByteFallback" and not fused:
        rule.steps.append(_from_byte_token)
        rule.invalid_bytes = _ONE_PER_BYTE
    elif kind == "Metaspace" and not fused:
        mark = settings["replacement"]
        if settings["prepend_scheme"] != "never":
            rule.first.append(_replacing(mark, ""))
        rule.steps.append(_replacing(mark, " "))
    elif kind == "Replace" and "String" in settings["pattern"] and not fused:
        rule.steps.append(_replacing(settings["pattern"]["String"], settings["content"]))
    elif kind == "Strip" and fused and settings["stop"] == 0:
        rule.leading += settings["content"] * settings["start"]
    else:
        return False
    return True


def _replacing(old: str, new: str) -> Step:
    return lambda piece: piece.replace(old, new) if isinstance(piece, str) else piece


def _from_byte_token(piece: Piece) -> Piece:
    """SentencePiece writes a byte that is in no token as `<0xF0>`."""
    found = _BYTE_TOKEN.fullmatch(piece) if isinstance(piece, str) else None
    return bytes([int(found[1], 16)]) if found else piece


def _from_byte_letters(piece: Piece) -> Piece:
    """Byte-level BPE writes every byte as a printable letter. A token with another letter is plain text, added later."""
    if isinstance(piece, bytes):
        return piece
    values = [_BYTE_OF.get(letter) for letter in piece]
    return piece if None in values else bytes(values)  # type: ignore[arg-type]


def _as_bytes(piece: Piece) -> bytes:
    return piece.encode() if isinstance(piece, str) else piece


def _byte_letters() -> dict[str, int]:
    """Printable Latin-1 letters stand for themselves, the other bytes for U+0100 onwards in their order.

    Source: the GPT-2 encoder's table.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_letters()
