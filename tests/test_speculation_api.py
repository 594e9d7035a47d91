"""Stop strings, streams and cancelled answers over real drafters: through the Python API, that of plain decoding."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from soloist import LLM, SamplingParams
from soloist.testing.checkpoints import write_checkpoint

PROMPT = "the cat and the dog and the cat and the dog"
ASKED: dict[str, Any] = {"temperature": 0.8, "seed": 4, "max_tokens": 48, "ignore_eos": True}


@cache
def folder(kind: str) -> Path:
    import tempfile

    return write_checkpoint(tempfile.mkdtemp(), kind, tokenizer=True)


@cache
def plain(kind: str) -> LLM:
    return LLM(str(folder(kind)), device="cpu", context_length=256)


def drafting(kind: str, **settings: Any) -> LLM:
    return LLM(str(folder(kind)), device="cpu", context_length=256, **settings)


def scripted(kind: str, tmp_path: Path, width: int) -> LLM:
    """Right but for every fifth token."""
    answer = plain(kind).generate(PROMPT, SamplingParams(**ASKED)).token_ids
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"script": [t if i % 5 else 0 for i, t in enumerate(answer)]}))
    return drafting(kind, drafter="scripted", drafter_path=str(path), draft_width=width)


@pytest.mark.parametrize("kind", ["llama", "ling-tiny"])
def test_a_stop_string_inside_a_block_gives_the_answer_of_plain_decoding(kind: str, tmp_path: Path) -> None:
    whole = plain(kind).generate(PROMPT, SamplingParams(**ASKED))
    blocks = scripted(kind, tmp_path, 7)
    for start in range(0, len(whole.text) - 3, max(1, len(whole.text) // 8)):
        asked = SamplingParams(**ASKED, stop=[whole.text[start : start + 3]])
        expected = plain(kind).generate(PROMPT, asked)
        found = blocks.generate(PROMPT, asked)
        for name in ("token_ids", "text", "finish_reason", "stop_reason", "usage"):
            assert getattr(found, name) == getattr(expected, name), (name, start)
        assert expected.finish_reason == "stop" and found.timings.rounds <= expected.timings.rounds


@pytest.mark.parametrize("width", [1, 4, 15, "auto"])
def test_streamed_pieces_are_the_answer_at_every_width(width: int | str) -> None:
    asked = SamplingParams(**ASKED, logprobs=2)
    expected = plain("qwen3").generate(PROMPT, asked)
    with drafting("qwen3", drafter="ngram", draft_width=width) as llm:
        events = list(llm.stream(PROMPT, asked))
        assert "".join(event.text for event in events) == expected.text
        assert [token for event in events for token in event.token_ids] == expected.token_ids
        output = events[-1].output
        assert output is not None and output.logprobs == expected.logprobs
        assert output.timings.drafted == sum(k * n for k, n in enumerate(output.timings.width_histogram))


def test_an_answer_cancelled_in_mid_block_leaves_the_next_one_alone(tmp_path: Path) -> None:
    asked = SamplingParams(**ASKED)
    expected = plain("llama").generate(PROMPT, asked)
    blocks = scripted("llama", tmp_path, 6)
    stream = blocks.stream(PROMPT, asked)
    for _ in range(4):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert blocks.generate(PROMPT, asked).token_ids == expected.token_ids
