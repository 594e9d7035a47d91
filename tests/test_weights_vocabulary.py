"""Vocabularies of GGUF files: the ids of a tokenizer written by hand, and a refusal of what is not known exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from soloist.errors import UserError
from soloist.weights.gguf_vocabulary import WORDS, tokenizer_json

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def metadata(model: str, tokens: list[tuple[str, int]], **settings: Any) -> dict[str, Any]:
    found = {"model": model, "tokens": [t for t, _ in tokens], "token_type": [k for _, k in tokens], **settings}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}


def build(found: dict[str, Any]) -> Tokenizer:
    text = tokenizer_json(Path("m.gguf"), found)
    assert text is not None
    return Tokenizer.from_str(text)


def byte_letters() -> list[str]:
    """GPT-2's letters for bytes 0 to 255: printable ones stand for themselves, the others follow from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (chr(256 + i) for i in range(256))
    return [chr(b) if b in printable else next(others) for b in range(256)]


LETTERS = byte_letters()
MERGES = ["1 2", "12 3", "a b", "Ġ ab", "ab c"]
BPE_TOKENS = [(letter, NORMAL) for letter in LETTERS] + [(m.replace(" ", ""), NORMAL) for m in MERGES]
BPE_TOKENS += [("<bos>", CONTROL), ("<mine>", USER), ("[PAD]", UNUSED), ("abcabc", NORMAL)]
IDS = {token: i for i, (token, _) in enumerate(BPE_TOKENS)}


def bpe(pre: str | None, **settings: Any) -> dict[str, Any]:
    return metadata("gpt2", BPE_TOKENS, merges=MERGES, pre=pre, bos_token_id=IDS["<bos>"], **settings)


def tokens(tokenizer: Tokenizer, text: str, special: bool = False) -> list[str]:
    return [BPE_TOKENS[i][0] for i in tokenizer.encode(text, add_special_tokens=special).ids]


@pytest.mark.parametrize("pre", WORDS)
def test_every_text_comes_back_from_its_ids(pre: str) -> None:
    tokenizer = build(bpe(pre))
    for text in ("abc ab 1234", "  \n\n\t x", "Ünïcode 漢字 🙂 don't WE'LL", "<bos>ab<mine>", "", "\r\n a\u00a0b"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "pre, cut", [("gpt-2", ["123"]), ("llama-bpe", ["123"]), ("smollm", ["1", "2", "3"]), ("qwen2", ["1", "2", "3"])]
)
def test_digits_are_cut_by_the_rule_that_the_file_names(pre: str, cut: list[str]) -> None:
    assert tokens(build(bpe(pre)), "123") == cut


def test_llama_3_takes_whole_words_before_merging() -> None:
    assert tokens(build(bpe("llama-bpe")), "abcabc") == ["abcabc"]
    assert tokens(build(bpe("gpt-2")), "abcabc") == ["abc", "abc"]


def test_markers_are_whole_and_hidden_and_users_tokens_are_shown() -> None:
    tokenizer = build(bpe("gpt-2"))
    assert tokens(tokenizer, "ab<bos><mine>ab") == ["ab", "<bos>", "<mine>", "ab"]
    assert tokenizer.decode([IDS["ab"], IDS["<bos>"], IDS["<mine>"]]) == "ab<mine>"
    assert tokens(tokenizer, "[PAD]") == list("[PAD]")


@pytest.mark.parametrize(
    "pre, told, begins",
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_bos_is_put_where_the_file_says(pre: str, told: bool | None, begins: bool) -> None:
    found = tokens(build(bpe(pre, add_bos_token=told)), "ab", special=True)
    assert found == (["<bos>", "ab"] if begins else ["ab"])


PIECES = [("<unk>", UNKNOWN, 0.0), ("<s>", CONTROL, 0.0), ("</s>", CONTROL, 0.0)]
PIECES += [(f"<0x{b:02X}>", BYTE, 0.0) for b in range(256)]
PIECES += [("▁a", NORMAL, -1.0), ("ab", NORMAL, -2.0), ("▁ab", NORMAL, -3.0), ("bc", NORMAL, -0.5)]
PIECES += [(letter, NORMAL, -9.0) for letter in "▁abc"]


def spm(**settings: Any) -> dict[str, Any]:
    own: dict[str, Any] = {"scores": [score for *_, score in PIECES], "bos_token_id": 1, "eos_token_id": 2}
    return metadata("llama", [(token, kind) for token, kind, _ in PIECES], **own | settings)


def pieces(text: str, special: bool = False, **settings: Any) -> list[str]:
    return [PIECES[i][0] for i in build(spm(**settings)).encode(text, add_special_tokens=special).ids]


def test_sentence_pieces_join_best_score_first() -> None:
    assert pieces("ab") == ["▁ab"]  # ▁a (-1) goes first, then b stays: ▁a + b is ▁ab
    assert pieces("abc") == ["▁a", "bc"]  # bc (-0.5) goes before everything
    assert pieces("ab", add_space_prefix=False) == ["ab"]


def test_sentence_pieces_fall_back_to_bytes_and_come_back() -> None:
    assert pieces("é") == ["▁", "<0xC3>", "<0xA9>"]
    assert pieces("a", special=True) == ["<s>", "▁a"]
    tokenizer = build(spm())
    for text in ("ab é 漢  a", " a", "a\nb"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_a_file_without_a_vocabulary_has_no_tokenizer() -> None:
    assert tokenizer_json(Path("m.gguf"), {}) is None


@pytest.mark.parametrize(
    "found, reason",
    [
        (bpe("who-knows"), "'who-knows'"),
        (bpe(None), "does not name its rule"),
        (metadata("bert", BPE_TOKENS), "kind 'bert'"),
        (metadata("gpt2", BPE_TOKENS, pre="gpt-2"), "lack tokenizer.ggml.merges"),
        (metadata("gpt2", BPE_TOKENS + BPE_TOKENS[:1], pre="gpt-2", merges=[]), "a token twice"),
        (bpe("gpt-2", token_type=[1]), "token types"),
        (spm(scores=[0.0]), "scores"),
        (spm(precompiled_charsmap=[1]), "precompiled_charsmap"),
        (spm(remove_extra_whitespaces=True), "remove_extra_whitespaces"),
    ],
)
def test_what_cannot_be_rebuilt_exactly_is_refused(found: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError) as caught:
        tokenizer_json(Path("m.gguf"), found)
    assert reason in str(caught.value) and "\n" not in str(caught.value)
