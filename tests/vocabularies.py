"""Two small tokenizers, trained here: byte-level BPE, and SentencePiece-like BPE with byte tokens."""

from __future__ import annotations

from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from soloist.text.source import TokenizerSource
from soloist.text.tokenizer import Tokenizer

TEXTS = ("the cat sat on the mat, and the cat ate the rat", "für die Möwen am Meer", "中文字 中文", "naïve café déjà vu")
SPECIAL = ("<s>", "</s>", "<|end|>")


@cache
def byte_level() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=310, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    made.add_tokens([AddedToken("<tool 中>"), AddedToken("€")])
    return made


@cache
def sentence_pieces() -> tokenizers.Tokenizer:
    letters = sorted({letter for text in TEXTS[:2] for letter in text.replace(" ", "▁")})
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "th", "the", "▁the", "at", "▁▁"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("a", "t"), ("▁", "▁")]
    ids = {name: i for i, name in enumerate(names)}
    made = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges, byte_fallback=True, unk_token="<s>"))
    made.add_special_tokens(list(SPECIAL))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return made


KINDS = {"byte-level": byte_level, "sentence-pieces": sentence_pieces}


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(TokenizerSource(KINDS[kind]().to_str(), kind))
