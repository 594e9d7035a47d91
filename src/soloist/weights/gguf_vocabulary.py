"""The vocabulary of a GGUF file as the tokenizer.json of the same model.

Two kinds exist: byte-level BPE (`gpt2`), whose cutting into words is only named in the file, and SentencePiece BPE
(`llama`), whose merges follow from the scores. What is not known exactly is refused: a wrong cut gives wrong ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from soloist.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_ENGLISH = r"'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_ENGLISH}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_LLAMA3, _QWEN2 = (
    rf"(?i:{_ENGLISH})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}{1,3}", _DIGIT)
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

WORDS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (_DIGIT, _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
}
"""`tokenizer.ggml.pre` -> expressions that cut a text into words, each applied to the pieces of the one before."""

WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
"""A word that is a token is never merged up from its letters; and a text begins with BOS unless the file says no."""

COMPOSED = ("qwen2", "deepseek-r1-qwen")
"""Trained on text in Unicode's composed form (NFC)."""


def tokenizer_json(path: Path, metadata: dict[str, Any]) -> str | None:
    """tokenizer.json of the `tokenizers` library; None for a file without a vocabulary.

    Raises: UserError for kinds of vocabulary that we cannot rebuild exactly.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        raise UserError(f"{path}: has a vocabulary of kind {kind!r}; gpt2 (byte-level BPE) and llama are supported")
    vocabulary = _Vocabulary(path, metadata)
    parts = _byte_level(vocabulary) if kind == "gpt2" else _sentence_pieces(vocabulary)
    return json.dumps({"version": "1.0", "added_tokens": vocabulary.added, **parts}, ensure_ascii=False)


class _Vocabulary:
    """Tokens and their kinds, checked to be of one length."""

    def __init__(self, path: Path, metadata: dict[str, Any]):
        self.path, self._metadata = path, metadata
        self.tokens: list[str] = self.setting("tokens")
        self.kinds: list[int] = self.setting("token_type", None) or [NORMAL] * len(self.tokens)
        if len(self.kinds) != len(self.tokens):
            counts = f"{len(self.tokens)} tokens but {len(self.kinds)} token types"
            raise UserError(f"{path}: has {counts}; convert the model again")
        if len(set(self.tokens)) < len(self.tokens):
            raise UserError(f"{path}: has a token twice in its vocabulary; convert the model again")

    def setting(self, key: str, *default: Any) -> Any:
        name = f"tokenizer.ggml.{key}"
        if name not in self._metadata and not default:
            raise UserError(f"{self.path}: the metadata lack {name}; convert the model again")
        return self._metadata.get(name, *default)

    @property
    def added(self) -> list[dict[str, Any]]:
        """Tokens found in a text before it is cut into words: markers, hidden in decoded text, and the user's own."""
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": i, "content": token, **flags, "special": kind != USER_DEFINED}
            for i, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind in (CONTROL, UNKNOWN, USER_DEFINED)
        ]

    def ids(self) -> dict[str, int]:
        """Without unused places, which no text has."""
        return {t: i for i, (t, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)) if kind != UNUSED}

    def framing(self, begins: bool) -> dict[str, Any] | None:
        """What is put around a text: BOS, EOS, or nothing."""
        before = [self.setting("bos_token_id")] if self.setting("add_bos_token", begins) else []
        after = [self.setting("eos_token_id")] if self.setting("add_eos_token", False) else []
        if not before and not after:
            return None
        names = {i: self.tokens[i] for i in before + after}

        def around(*texts: str) -> list[dict[str, Any]]:
            row: list[dict[str, Any]] = []
            for number, text in enumerate(texts):
                row += [{"SpecialToken": {"id": names[i], "type_id": number}} for i in before]
                row += [{"Sequence": {"id": text, "type_id": number}}]
                row += [{"SpecialToken": {"id": names[i], "type_id": number}} for i in after]
            return row

        special = {name: {"id": name, "ids": [i], "tokens": [name]} for i, name in names.items()}
        return {
            "type": "TemplateProcessing",
            "single": around("A"),
            "pair": around("A", "B"),
            "special_tokens": special,
        }


def _byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    pre = vocabulary.setting("pre", None)
    if pre not in WORDS:
        found = f"cuts text by the rule {pre!r}" if pre else "does not name its rule for cutting text"
        raise UserError(
            f"{vocabulary.path}: the vocabulary {found} (tokenizer.ggml.pre); supported are {', '.join(WORDS)}: "
            "give the prompt as token ids, or use the model's Hugging Face folder"
        )
    merges = [merge.split(" ") for merge in vocabulary.setting("merges")]
    cuts = [
        {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False} for words in WORDS[pre]
    ]
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if pre in COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, to_bytes]},
        "post_processor": vocabulary.framing(begins=pre in WHOLE_WORDS_FIRST),
        "decoder": to_bytes,
        "model": {
            "type": "BPE", "vocab": vocabulary.ids(), "merges": merges, "ignore_merges": pre in WHOLE_WORDS_FIRST,
        },
    }  # fmt: skip


def _sentence_pieces(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Spaces are written as the mark U+2581, letters without a token as their UTF-8 bytes."""
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if vocabulary.setting(key, None):
            raise UserError(f"{vocabulary.path}: the vocabulary needs tokenizer.ggml.{key}, which is not supported")
    prefixed = vocabulary.setting("add_space_prefix", True)
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prefix = [{"type": "Prepend", "prepend": "▁"}] if prefixed else []
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, mark]},
        "pre_tokenizer": None,
        "post_processor": vocabulary.framing(begins=True),
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE", "vocab": vocabulary.ids(), "merges": _merges_by_score(vocabulary), "byte_fallback": True,
            "unk_token": vocabulary.tokens[vocabulary.setting("unknown_token_id", 0)], "fuse_unk": True,
        },
    }  # fmt: skip


def _merges_by_score(vocabulary: _Vocabulary) -> list[list[str]]:
    """SentencePiece joins the pair whose joined piece scores best: every pair of pieces that is a piece, best first."""
    scores: list[float] = vocabulary.setting("scores")
    if len(scores) != len(vocabulary.tokens):
        counts = f"{len(vocabulary.tokens)} tokens but {len(scores)} scores"
        raise UserError(f"{vocabulary.path}: has {counts}; convert the model again")
    plain = {t: i for i, t in enumerate(vocabulary.tokens) if vocabulary.kinds[i] in (NORMAL, USER_DEFINED)}
    pairs = []
    for token, i in plain.items():
        for cut in range(1, len(token)):
            left, right = plain.get(token[:cut]), plain.get(token[cut:])
            if left is not None and right is not None:
                pairs.append((-scores[i], left, right, [token[:cut], token[cut:]]))
    return [pair for *_, pair in sorted(pairs, key=lambda found: found[:3])]
