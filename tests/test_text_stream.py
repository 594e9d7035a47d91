"""Text that arrives in blocks of tokens is the text of all tokens, cut where plain decoding would cut it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from soloist.errors import UserError
from soloist.text.source import TokenizerSource
from soloist.text.stops import StopFinder
from soloist.text.stream import TextEvent, TextStream
from soloist.text.tokenizer import Tokenizer, load_tokenizer
from tests.vocabularies import KINDS, byte_level, sentence_pieces, tokenizer

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
HARD_TEXTS = ("", " ", "  two", "한국어 텍스트", f"a{FAMILY}b", "e\u0301\u0323", "中文字 😀!", "the cat\nsat", "\ufffd")
kinds = pytest.mark.parametrize("kind", KINDS)
token_lists = st.lists(st.integers(0, 320), max_size=24)
cuts = st.lists(st.integers(1, 8), min_size=24, max_size=24)


def blocks(ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    out, at = [], 0
    for size in sizes:
        out.append(ids[at : at + size])
        at += size
    return [block for block in out if block]


def read(kind: str, ids: Sequence[int], sizes: Sequence[int], stops: Sequence[str] = ()) -> tuple[str, int, str | None]:
    """Text, tokens used and stop of a whole request."""
    stream, texts, used = TextStream(tokenizer(kind), stops), [], 0
    for block in blocks(ids, sizes):
        event = stream.push(block)
        texts.append(event.text)
        used += event.num_tokens_used
        if event.stop is not None:
            return "".join(texts), used, event.stop
    return "".join([*texts, stream.flush()]), used, None


@kinds
@given(ids=token_lists, sizes=cuts)
@settings(deadline=None)
def test_increments_and_flush_are_the_decoded_text(kind: str, ids: list[int], sizes: list[int]) -> None:
    assert read(kind, ids, sizes) == (tokenizer(kind).decode(ids), len(ids), None)


@given(ids=token_lists)
@settings(deadline=None, max_examples=300)
def test_byte_level_text_is_that_of_the_library_also_for_invalid_bytes(ids: list[int]) -> None:
    for skip in (True, False):
        expected = byte_level().decode(ids, skip_special_tokens=skip)
        assert tokenizer("byte-level").decode(ids, skip_special=skip) == expected


@kinds
@given(text=st.text() | st.sampled_from(HARD_TEXTS))
@settings(deadline=None)
def test_decoding_undoes_encoding(kind: str, text: str) -> None:
    own, library = tokenizer(kind), KINDS[kind]()
    assert own.encode(text) == library.encode(text).ids
    markers = set(own.encode(text)) & own.special_ids
    assert markers or own.decode(own.encode(text)) == text == library.decode(library.encode(text).ids)


@kinds
@given(sizes=cuts, min_tokens=st.integers(0, 12))
@settings(deadline=None)
def test_stop_strings_count_only_after_min_tokens(kind: str, sizes: list[int], min_tokens: int) -> None:
    """However the tokens come in blocks, the stop is the first one that lies behind the first `min_tokens` tokens."""
    ids = tokenizer(kind).encode("the cat the cat the cat")
    stream, texts, used, stop = TextStream(tokenizer(kind), ["cat"], min_tokens), [], 0, None
    for block in blocks(ids, sizes):
        event = stream.push(block)
        texts.append(event.text)
        used += event.num_tokens_used
        if stop := event.stop:
            break
    unsearched = tokenizer(kind).detokenizer()
    head = "".join(unsearched.push(token) for token in ids[:min_tokens])
    shown = "".join(texts) + ("" if stop else stream.flush())
    assert shown.startswith(head) and "cat" not in shown[len(head) :]
    assert (used > min_tokens) if stop else used == len(ids)


def bytes_in_pieces(*values: int) -> list[int]:
    return [sentence_pieces().token_to_id(f"<0x{value:02X}>") for value in values]


def test_a_broken_byte_run_keeps_its_whole_characters() -> None:
    """The library gives up the run, whole characters too; a stream has shown them already. Otherwise they agree."""
    the, ids = sentence_pieces().token_to_id("the"), bytes_in_pieces(0xF0, 0x9F)
    for run in (ids, [*ids, the], bytes_in_pieces(0x80, 0x80), [the, *ids]):
        assert tokenizer("sentence-pieces").decode(run) == sentence_pieces().decode(run)
    mixed = [*bytes_in_pieces(*"é".encode()), *ids]
    assert tokenizer("sentence-pieces").decode(mixed) == "é\ufffd\ufffd"
    assert sentence_pieces().decode(mixed) == "\ufffd" * 4


@kinds
def test_no_half_character_is_ever_shown(kind: str) -> None:
    stream, ids = TextStream(tokenizer(kind)), tokenizer(kind).encode(f"x{FAMILY}中")
    shown = [stream.push([token]).text for token in ids]
    assert "\ufffd" not in "".join(shown) and "".join(shown) == f"x{FAMILY}中" and stream.flush() == ""
    stream = TextStream(tokenizer(kind))
    assert "\ufffd" not in "".join(stream.push([token]).text for token in tokenizer(kind).encode("x😀")[:-1])
    assert "\ufffd" in stream.flush() and stream.flush() == ""


@kinds
def test_decoding_tokens_one_by_one_breaks_characters_and_spaces(kind: str) -> None:
    """Negative control: what streams must not do fails the law above."""
    ids = tokenizer(kind).encode("the cat 😀")
    assert "".join(KINDS[kind]().decode([token]) for token in ids) != "the cat 😀"


def test_special_tokens_and_padded_rows_are_no_text() -> None:
    own = tokenizer("byte-level")
    ids = own.encode("a</s>b")
    assert own.decode([*ids, 99_999]) == "ab" and own.decode(ids, skip_special=False) == "a</s>b"
    assert own.token(99_999) is None and own.token(-1) is None and own.token_bytes(99_999) == b""
    assert own.vocab_size == byte_level().get_vocab_size() and own.token_id("</s>") in own.special_ids


@pytest.mark.parametrize("decoder", [None, decoders.Metaspace(), decoders.Metaspace(prepend_scheme="never")])
@given(ids=st.lists(st.integers(0, 4), max_size=8))
@settings(deadline=None)
def test_other_decoders_agree_with_the_library(decoder: decoders.Decoder | None, ids: list[int]) -> None:
    words = {"▁a": 0, "b": 1, "▁": 2, "c▁d": 3, "▁▁": 4}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="b"))
    if decoder is not None:
        library.decoder = decoder
    assert Tokenizer(TokenizerSource(library.to_str(), "t")).decode(ids) == library.decode(ids)


def test_a_decoder_that_looks_at_neighbours_is_refused() -> None:
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    library.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match="token by token"):
        Tokenizer(TokenizerSource(library.to_str(), "t"))


def plain_cut(kind: str, ids: Sequence[int], stops: Sequence[str]) -> tuple[str, int, str | None]:
    """The law itself, quadratic: after each token search all text that is certain so far."""
    for used in range(1, len(ids) + 1):
        stream = tokenizer(kind).detokenizer()
        text = "".join(stream.push(token) for token in ids[:used])
        found = [(text.find(stop), i) for i, stop in enumerate(stops) if stop in text]
        if found:
            begin, i = min(found)
            return text[:begin], used, stops[i]
    return tokenizer(kind).decode(ids), len(ids), None


@kinds
@given(data=st.data(), sizes=cuts)
@settings(deadline=None, max_examples=200)
def test_a_stop_string_cuts_where_plain_decoding_cuts(kind: str, data: st.DataObject, sizes: list[int]) -> None:
    text = data.draw(st.text("aabth e中😀é", max_size=16))
    ids = tokenizer(kind).encode(text)[:24]
    part = st.text("aabth e中😀é", min_size=1, max_size=4)
    stops = data.draw(st.lists(part, min_size=1, max_size=3))
    assert read(kind, ids, sizes, stops) == plain_cut(kind, ids, stops)


@kinds
@pytest.mark.parametrize("size", range(1, 17))
def test_every_part_of_a_text_works_as_stop_in_every_block_size(kind: str, size: int) -> None:
    text = "the cat 😀 sat; 中文 at the mat"
    ids = tokenizer(kind).encode(text)
    for begin in range(len(text) - 2):
        stop = text[begin : begin + 3]
        shown, _, found = read(kind, ids, [size] * 48, [stop])
        assert (shown, found) == (text[: text.find(stop)], stop)


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "stop"),
    [
        (["ab"], ["xa", "by"], ["x", ""], "ab"),
        (["aab"], ["aa", "ab"], ["", "a"], "aab"),
        (["b", "abc"], ["abc"], [""], "abc"),
        (["b", "abc"], ["a", "b"], ["", "a"], "b"),
        (["ab", "abc"], ["abc"], [""], "ab"),
        (["abc", "ab"], ["abc"], [""], "abc"),
        (["abd"], ["ab", "c"], ["", "abc"], None),
        (["\n\n"], ["a\n", "\n"], ["a", ""], "\n\n"),
        (["👩\u200d"], ["👩", "\u200d"], ["", ""], "👩\u200d"),
    ],
)  # fmt: skip
def test_which_stop_counts_and_what_is_held_back(stops: list[str], pieces: list[str], shown: list[str], stop: str | None) -> None:  # fmt: skip # noqa: E501
    finder = StopFinder(stops)
    results = [finder.push(piece) for piece in pieces]
    assert [text for text, _ in results] == shown and results[-1][1] == stop


@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_only_what_could_become_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    finder, shown = StopFinder(stops), ""
    for letter in text:
        part, stop = finder.push(letter)
        shown += part
        if stop is not None:
            return
    held = text[len(shown) :]
    longest = max(n for n in range(len(text) + 1) if n == 0 or any(s.startswith(text[-n:]) for s in stops))
    assert text.startswith(shown) and len(held) == longest and finder.flush() == held and finder.flush() == ""


def test_held_text_comes_out_at_the_end() -> None:
    own = tokenizer("byte-level")
    stream = TextStream(own, ["cat!"])
    event = stream.push(own.encode("the cat"))
    assert event.text + stream.flush() == "the cat" and not event.text.endswith("cat")
    assert TextStream(own).push([]) == TextEvent("", 0)


def test_searching_each_block_alone_misses_stops() -> None:
    """Negative control: a search without memory does not find what the law finds."""
    own = tokenizer("byte-level")
    ids = own.encode("xyz")
    assert len(ids) == 3 and read("byte-level", ids, [1] * 24, ["yz"])[2] == "yz"
    assert not any("yz" in own.decode([token]) for token in ids)


@pytest.mark.parametrize("damaged", ["{}", "[]", "x", '{"version": "1.0"}'])
def test_a_damaged_tokenizer_is_named(damaged: str) -> None:
    with pytest.raises(UserError, match="here.json"):
        load_tokenizer(TokenizerSource(damaged, "here.json"))
    assert load_tokenizer(None) is None


def test_half_characters_are_refused_and_saved_lengths_are_ignored() -> None:
    with pytest.raises(UserError, match=r"U\+D800 at character 1"):
        tokenizer("byte-level").encode("a\ud800")
    library = tokenizers.Tokenizer.from_str(byte_level().to_str())
    library.enable_truncation(2)
    library.enable_padding(length=40)
    own = Tokenizer(TokenizerSource(library.to_str(), "t"))
    assert own.encode("the cat sat") == byte_level().encode("the cat sat").ids


def test_settings_decide_whether_a_text_begins_with_bos() -> None:
    json, special = byte_level().to_str(), {"bos_token": "<s>"}
    bare, bos = byte_level().encode("a").ids, byte_level().token_to_id("<s>")
    begun = tokenizers.Tokenizer.from_str(json)
    begun.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", bos), ("</s>", bos + 1)]
    )
    for source, add_bos, expected in (
        (json, None, bare), (json, False, bare), (json, True, [bos, *bare]),
        (begun.to_str(), None, [bos, *bare, bos + 1]), (begun.to_str(), True, [bos, *bare, bos + 1]),
        (begun.to_str(), False, [*bare, bos + 1]),
    ):  # fmt: skip
        own = Tokenizer(TokenizerSource(source, "t", special_tokens=special, add_bos=add_bos))
        assert own.encode("a") == expected and own.encode("a", add_special=False) == bare
