"""What a tokenizer is made from, whichever kind of file it was stored in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from soloist.errors import UserError


@dataclass(frozen=True)
class TokenizerSource:
    """json: a tokenizer.json of the `tokenizers` library. chat_templates: name -> jinja; the usual one is `default`.
    special_tokens: `bos_token`, `eos_token`, ... -> its text, for templates. origin: the file, for messages.
    add_bos: whether a text begins with bos_token, where settings beside tokenizer.json say so; None: the json decides.
    """

    json: str
    origin: str
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    add_bos: bool | None = None


def union_eos(*sources: Any) -> tuple[int, ...]:
    """All ids that end a text, in the order found.

    Args: sources: what config.json, generation_config.json and the tokenizer hold: an id, a list of ids, or None.
    Raises: UserError for anything else.
    """
    found: dict[int, None] = {}
    for source in sources:
        for token in source if isinstance(source, list | tuple) else [source]:
            if token is None:
                continue
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise UserError(f"eos_token_id={source!r} must be a token id or a list of token ids")
            found[token] = None
    return tuple(found)
