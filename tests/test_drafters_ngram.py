"""Prompt lookup equals a plain search of the text, and never proposes what is no token."""

from __future__ import annotations

import random

import pytest
import torch

from soloist.config import SamplingParams
from soloist.drafters.ngram import CONFIDENCE, NgramDrafter
from soloist.ops.ngram_match import ngram_match
from tests import speculate
from tests.speculate import V, engine, run, tokens


def search(text: list[int], longest: int, width: int) -> tuple[list[int], int]:
    """The rule in words: try long suffixes first, walk back from the most recent place, copy token by token."""
    end = len(text) - 1
    for length in range(min(longest, end), 0, -1):
        suffix = text[end + 1 - length :]
        for last in range(end - 1, length - 2, -1):
            if text[last + 1 - length : last + 1] == suffix:
                copied = list(text)
                for k in range(width):
                    copied.append(copied[last + 1 + k])
                return copied[end + 1 :], length
    return [text[end]] * width, 0


def found(text: list[int], longest: int, width: int, beyond: int = 5) -> tuple[list[int], int]:
    history = torch.tensor(text + [text[-1]] * beyond)  # what lies beyond the end must not count
    ids, length = ngram_match(history, torch.tensor([len(text) - 1]), longest, width)
    return ids.tolist(), int(length)


def test_lookup_equals_a_plain_search() -> None:
    draw = random.Random(5)
    lengths = set()
    for _ in range(600):
        vocabulary = draw.choice((1, 2, 3, 8, 40))
        text = [draw.randrange(vocabulary) for _ in range(draw.randrange(1, 60))]
        longest, width = draw.randrange(1, 9), draw.randrange(1, 16)
        expected = search(text, longest, width)
        lengths.add(expected[1])
        assert found(text, longest, width) == expected, text
    assert lengths == set(range(9)), "some lengths of a match never occurred"


def test_negative_control_the_first_instead_of_the_most_recent_place_is_another_answer() -> None:
    text = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2]
    assert found(text, 4, 1) == search(text, 4, 1) == ([4], 3)  # 9 1 2 -> 4
    assert found(text[:-3] + [8, 1, 2], 4, 1) == ([4], 2)  # 1 2 -> 4, the later one, not 3


def test_a_loop_is_continued_for_ever() -> None:
    assert found([5, 1, 2, 3, 1, 2, 3], 8, 7) == ([1, 2, 3, 1, 2, 3, 1], 3)
    assert found([7, 7], 8, 4) == ([7] * 4, 1)


@pytest.mark.parametrize("text", [[4], [4, 5, 6, 7]])
def test_without_a_match_the_last_token_is_proposed(text: list[int]) -> None:
    assert found(text, 8, 3) == ([text[-1]] * 3, 0)


def test_proposals_are_those_of_a_search_over_prompt_and_output_after_every_round() -> None:
    drafter = NgramDrafter(6)
    served = engine("llama", drafter)
    prompt = tuple([1, 2, 3, 4] * 5)
    asked = SamplingParams(temperature=0.0, max_tokens=40)
    request = speculate.Request(prompt, (), asked)
    text, accepted = list(prompt), 0
    assert drafter.confidence is not None
    for result in served.run(request):
        assert result is not None
        text += result.tokens
        accepted += len(result.tokens) - 1
        ids, length = search(text, len(CONFIDENCE) - 1, 6)
        assert speculate.proposal(served, 6) == ids
        chances = [CONFIDENCE[min(length + k, len(CONFIDENCE) - 1)] if length > 1 else 0.0 for k in range(6)]
        assert drafter.confidence.tolist() == pytest.approx(chances)
        assert result.confidence == drafter.confidence.tolist()
    assert accepted, "nothing was ever accepted, so the test saw no window with more than one kept row"


def test_a_new_request_sees_nothing_of_the_last_one() -> None:
    asked = SamplingParams(temperature=0.0, max_tokens=12)
    fresh, used = engine("llama", NgramDrafter(4)), engine("llama", NgramDrafter(4))
    run(used, asked, tuple(range(60)) * 2)
    prompt = (3, 4, 5)
    left, right = run(fresh, asked, prompt), run(used, asked, prompt)
    assert tokens(left) == tokens(right) and [r.confidence for r in left] == [r.confidence for r in right]
    assert all(0 <= token < V for token in tokens(left))
