"""Laws of the window: same bits at every width, any chunking of the prompt, and state by commit."""

from __future__ import annotations

import pytest
import torch

from soloist.state.sequence import Sequence
from tests import models

KINDS = list(models.CONFIGS)
PROMPT, TOTAL = 37, 120


@pytest.fixture(autouse=True)
def no_grad() -> object:
    with torch.inference_mode():
        yield


def one_by_one(kind: str, dtype: torch.dtype, text: torch.Tensor) -> torch.Tensor:
    model, state = models.decoder(kind, dtype), models.sequence(kind, dtype)
    models.feed_prompt(model, state, text[:PROMPT])
    return torch.cat([models.feed_window(model, state, text[j : j + 1], 1) for j in range(PROMPT, len(text))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_window_of_T_rows_has_the_bits_of_T_windows_of_one_row(kind: str, dtype: torch.dtype) -> None:
    text = models.ids(TOTAL)
    expected = one_by_one(kind, dtype, text)
    model = models.decoder(kind, dtype)
    for T in range(1, 17):
        state = models.sequence(kind, dtype)
        models.feed_prompt(model, state, text[:PROMPT])
        for first in range(PROMPT, TOTAL - T, T):
            rows = models.feed_window(model, state, text[first : first + T], T)
            assert torch.equal(rows, expected[first - PROMPT : first - PROMPT + T]), (T, first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_cut_at_multiples_of_64_gives_the_bits_of_a_whole_one(kind: str, dtype: torch.dtype) -> None:
    """On a CPU. Prefix reuse relies on it, and tries it on the model at hand."""
    model = models.decoder(kind, dtype)
    for total in (193, 200, 208, 209, 230):
        text, found = models.ids(total), []
        for chunk in (total, 64, 128, 192):
            state = models.sequence(kind, dtype)
            state.base_length.fill_(total)
            found.append(models.feed_prompt(model, state, text, chunk))
        assert all(torch.equal(each, found[0]) for each in found), total


@pytest.mark.parametrize("kind", KINDS)
def test_logits_do_not_depend_on_how_the_prompt_is_cut(kind: str) -> None:
    text, model = models.ids(150), models.decoder(kind)
    whole = models.sequence(kind)
    whole.base_length.fill_(150)  # the dynamic rope looks at the prompt's length
    expected = models.feed_prompt(model, whole, text)
    for chunk in (1, 7, 64, 149):
        state = models.sequence(kind)
        state.base_length.fill_(150)
        found = models.feed_prompt(model, state, text, chunk)
        assert (found - expected).norm() / expected.norm() <= 1e-5


def assert_same_state(a: Sequence, b: Sequence) -> None:
    """Bit-equal committed state: cached positions, last conv inputs, live matrices."""
    length = int(a.length)
    assert length == int(b.length)
    x, y = a.recurrence(), b.recurrence()
    pairs = [*zip(x.histories, y.histories, strict=True), *zip(x.matrices, y.matrices, strict=True)]
    pairs += zip(a.rows(0, length), b.rows(0, length), strict=True)
    assert pairs and all(torch.equal(left, right) for left, right in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_commit_of_any_n_leaves_the_state_of_plain_decoding(kind: str) -> None:
    text, model = models.ids(80), models.decoder(kind)
    for T in (1, 2, 5, 16):
        for n in range(1, T + 1):
            plain, state = models.sequence(kind), models.sequence(kind)
            for each in (plain, state):
                models.feed_prompt(model, each, text[:PROMPT])
            drafted = text[PROMPT : PROMPT + T].clone()
            drafted[n:] = (drafted[n:] + 1) % 101  # rejected tokens were other ones
            models.feed_window(model, state, drafted, n)
            for j in range(n):
                models.feed_window(model, plain, text[PROMPT + j : PROMPT + j + 1], 1)
            assert_same_state(plain, state)


@pytest.mark.parametrize("kind", KINDS)
def test_commit_of_nothing_changes_nothing(kind: str) -> None:
    text, model = models.ids(80), models.decoder(kind)
    plain, state = models.sequence(kind), models.sequence(kind)
    for each in (plain, state):
        models.feed_prompt(model, each, text[:PROMPT])
        models.feed_window(model, each, text[PROMPT : PROMPT + 4], 3)
    models.feed_window(model, state, text[50:66], 0)
    assert_same_state(plain, state)


@pytest.mark.parametrize("kind", ["ling-flash", "llama"])
def test_negative_control_a_commit_that_keeps_one_row_too_many_is_caught(kind: str) -> None:
    text, model = models.ids(80), models.decoder(kind)
    plain, state = models.sequence(kind), models.sequence(kind)
    for each in (plain, state):
        models.feed_prompt(model, each, text[:PROMPT])
    models.feed_window(model, plain, text[PROMPT : PROMPT + 5], 3)
    models.feed_window(model, state, text[PROMPT : PROMPT + 5], 4)
    with pytest.raises(AssertionError):
        assert_same_state(plain, state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_resumed_from_copies_goes_on_exactly_as_it_did(kind: str) -> None:
    text, model = models.ids(200), models.decoder(kind)
    state = models.sequence(kind)
    models.feed_prompt(model, state, text[:130])  # into the second page
    rows, recurrence = state.rows(0, 130), state.recurrence()
    expected = models.feed_window(model, state, text[130:140], 10)
    for _ in range(2):
        state.reset(0)
        models.feed_prompt(model, state, text[60:])  # another text in between
        state.reset(0)
        state.put_rows(0, rows)
        state.resume(130, recurrence)
        assert torch.equal(models.feed_window(model, state, text[130:140], 10), expected)


@pytest.mark.parametrize("kind", ["ling-flash", "llama"])
def test_stale_rows_beyond_the_length_are_never_read(kind: str) -> None:
    text, model = models.ids(80), models.decoder(kind)
    plain, state = models.sequence(kind), models.sequence(kind)
    for each in (plain, state):
        models.feed_prompt(model, each, text[:PROMPT])
    for cache in state.caches:
        if isinstance(cache, torch.Tensor):
            cache[0, :, PROMPT:] = 1e4
            cache[1:] = 1e4
        else:
            cache.states[1:] = float("nan")
    rows = [models.feed_window(model, each, text[PROMPT : PROMPT + 6], 6) for each in (plain, state)]
    assert torch.equal(*rows)
