"""Prefix reuse: a prompt that begins like an earlier one gives the text, the state and the drafts of a fresh engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soloist import LLM
from soloist.config import SamplingParams
from soloist.drafters.drafter import Drafter, NoDraft
from soloist.drafters.ngram import NgramDrafter
from soloist.runtime.engine import Engine, Request
from soloist.runtime.prefill import CUT
from soloist.state.prefix import MARGIN, PrefixCache
from soloist.testing.checkpoints import write_checkpoint
from tests import llms, models, test_dspark_model, test_mtp
from tests.dspark_files import write_drafter
from tests.naive_dspark import Facts
from tests.speculate import Steered, V, engine, run, tokens
from tests.test_windows import assert_same_state

KINDS = list(models.CONFIGS)
PLENTY = 1 << 24
CHUNK = 16  # small units, so that short texts have many


def params(count: int = 4, temperature: float = 0.8, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": temperature, "seed": 3, "max_tokens": count, **more})


def reusing(kind: str, chunk: int = CHUNK, budget: int = PLENTY) -> Engine:
    return engine(kind, NoDraft(), chunk=chunk, prefix_cache_bytes=budget)


@cache
def without(kind: str, chunk: int = CHUNK) -> Engine:
    """Begins every prompt at its first token."""
    return engine(kind, NoDraft(), chunk=chunk)


def ids(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(models.ids(count, seed).tolist())


@cache
def said(kind: str, prompt: tuple[int, ...], asked: SamplingParams) -> list[int]:
    """What an engine says that reuses nothing."""
    return tokens(run(without(kind), asked, prompt))


def check(served: Engine, fresh: Engine, prompt: tuple[int, ...], asked: SamplingParams) -> list[int]:
    """One request on both: same text, same state behind it; the books are right."""
    found, expected = (tokens(run(each, asked, prompt)) for each in (served, fresh))
    assert found == expected
    assert_same_state(served.parts.sequence, fresh.parts.sequence)
    assert_books(served.prefixes)
    return found


def assert_books(prefixes: PrefixCache) -> None:
    held = sum(unit.num_bytes for root in prefixes._roots.values() for unit in root.below())
    assert prefixes.num_bytes == held <= prefixes.budget_bytes


@pytest.mark.parametrize("kind, chunk", [*((kind, chunk) for kind in KINDS for chunk in (512, CHUNK)), ("ling-tiny", 20)])
def test_a_conversation_computes_its_new_turns_only_and_gives_the_text_of_fresh_engines(kind: str, chunk: int) -> None:
    served, fresh = reusing(kind, chunk), without(kind, chunk)
    size = served.prefixes.size
    assert size == {512: CUT, CHUNK: CHUNK, 20: 20}[chunk]
    prompt, before = ids(10), 0
    for turn in range(6):
        asked = params(9, 0.9 * (turn % 2), seed=turn, frequency_penalty=0.1 * turn)
        answer = check(served, fresh, prompt, asked)
        computed = len(prompt) - served.prefixes.begun
        if kind != "llama-dynamic" or len(prompt) <= 64:  # beyond that its angles depend on the prompt's length
            assert computed <= len(prompt) - before + size + MARGIN, turn
        before = len(prompt)
        prompt += (*answer, *ids(16, turn))
    assert served.prefixes.begun >= 64 or kind == "llama-dynamic"


@pytest.mark.parametrize("kind", ["ling-flash", "llama"])
@pytest.mark.parametrize("length", [47, 48, 49, 72])
def test_the_same_prompt_again_is_a_hit_that_computes_at_least_one_token(kind: str, length: int) -> None:
    served = reusing(kind)
    for repeat in range(3):
        check(served, without(kind), ids(length), params(seed=repeat))
        if repeat:
            assert length - CHUNK - MARGIN <= served.prefixes.begun < length


@pytest.mark.parametrize("kind", KINDS)
def test_shorter_longer_and_diverging_prompts(kind: str) -> None:
    served, text = reusing(kind), ids(60)
    check(served, without(kind), text, params())
    for cut in (59, 33, 32, 15, 1, 48):
        check(served, without(kind), text[:cut], params())
        assert served.prefixes.begun < cut
        check(served, without(kind), (*text[:cut], *ids(50 - cut // 2, seed=cut)), params())
        assert served.prefixes.begun <= cut


def test_a_prompt_that_differs_in_the_token_behind_a_unit_does_not_take_it() -> None:
    """The last row of a drafter's cache was made with that token."""
    served, text = reusing("llama"), ids(40)
    check(served, without("llama"), text, params())
    other = (*text[:32], (text[32] + 1) % V, *text[33:])
    check(served, without("llama"), other, params())
    assert served.prefixes.begun == 16


def test_recurrences_are_taken_where_prompts_part() -> None:
    """Two conversations share a beginning: the second shows where, from the third on it is not computed."""
    served, shared, begun = reusing("ling-flash"), ids(50), []
    for seed in range(1, 4):
        check(served, without("ling-flash"), (*shared, *ids(60, seed)), params())
        begun.append(served.prefixes.begun)
    assert begun == [0, 0, 48]


@pytest.mark.parametrize("kind", ["ling-flash", "ling-tiny", "qwen3"])
def test_conversations_that_take_turns_keep_their_prefixes(kind: str) -> None:
    served = reusing(kind)
    talks = [ids(40, seed) for seed in range(3)]
    for turn in range(3):
        for which in range(3):
            answer = check(served, without(kind), talks[which], params())
            assert served.prefixes.begun >= (len(talks[which]) - 13 - CHUNK - MARGIN if turn else 0)
            talks[which] += (*answer, *ids(9, turn))
    assert served.prefixes.num_bytes > 0


@pytest.mark.parametrize("kind", ["ling-flash", "qwen3"])
def test_a_small_budget_costs_hits_but_never_the_text(kind: str) -> None:
    probe = reusing(kind)
    for seed in range(3):
        run(probe, params(), ids(70, seed))
    whole, hits = probe.prefixes.num_bytes, []
    for share in (0.001, 0.3, 1):
        served = reusing(kind, budget=max(1, int(whole * share)))
        hits.append(0)
        for turn in range(5):
            prompt = (*ids(70, turn % 3), *ids(9, turn))
            assert tokens(run(served, params(), prompt)) == said(kind, prompt, params())
            assert_books(served.prefixes)
            hits[-1] += served.prefixes.begun
    assert hits == sorted(hits) and hits[0] < hits[-1]


def test_no_budget_keeps_nothing() -> None:
    served = reusing("ling-tiny", budget=0)
    for _ in range(2):
        run(served, params(), ids(70))
        assert served.prefixes.begun == 0 and not served.prefixes._roots


@pytest.mark.parametrize("kind", ["ling-flash", "llama"])
def test_what_an_aborted_request_left_is_complete_or_not_used(kind: str) -> None:
    served, text = reusing(kind), ids(90)
    for steps in (0, 1, 2, 4, 8):
        broken = served.run(Request((*text, *ids(10, steps)), (), params(20)))
        for _ in range(steps):
            next(broken)
        broken.close()  # type: ignore[attr-defined]
        check(served, without(kind), (*text, *ids(12, steps)), params())
    assert served.prefixes.begun >= 64


@pytest.mark.parametrize("kind", ["ling-flash", "llama"])
def test_others_who_use_the_sequence_in_between_change_nothing(kind: str) -> None:
    served, fresh, text = reusing(kind), without(kind), ids(70)
    for turn in range(3):
        check(served, fresh, (*text, *ids(5, turn)), params())
        if turn == 0:
            served.logits(ids(100, 8))
        if turn == 1:
            run(served.plain(), params(), ids(80, 9))
    check(served, fresh, text, params())
    check(served, fresh, text, params())
    assert served.prefixes.begun >= 48


# ---- drafters ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drafting:
    """How to build an engine around a drafter of one kind."""

    drafter: Callable[[], Drafter]
    served: Callable[[Drafter], Engine]


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Drafting]:
    folder: Path = tmp_path_factory.mktemp("dspark")
    write_drafter(folder, Facts(), "deepspec", 6)
    return {
        "ngram": Drafting(lambda: NgramDrafter(5), lambda d: engine("ling-tiny", d, chunk=CHUNK)),
        "mtp": Drafting(lambda: test_mtp.mtp(5), lambda d: test_mtp.served(d, chunk=CHUNK)),
        "dspark": Drafting(lambda: test_dspark_model.load(folder, 5), lambda d: test_dspark_model.served(d, chunk=CHUNK)),
    }


def with_reuse(served: Engine) -> Engine:
    served.prefixes = PrefixCache(served.parts.sequence, CHUNK, PLENTY)
    return served


def proposals(
    make: Drafting, served: Engine | None, prompt: tuple[int, ...], count: int = 16
) -> tuple[list[list[int]], Engine]:
    """What a drafter proposes, under mixed acceptance, on an engine that is given or on a fresh one."""
    answer = tokens(run(make.served(NoDraft()), params(count), prompt))
    if served is None:
        served = make.served(make.drafter())
    inner = served.parts.drafter
    steered = Steered(inner, answer)
    served.parts = replace(served.parts, drafter=steered)
    served.runner.parts = served.parts  # type: ignore[attr-defined]
    assert tokens(run(served, params(count), prompt)) == answer
    served.parts = replace(served.parts, drafter=inner)
    served.runner.parts = served.parts  # type: ignore[attr-defined]
    return steered.proposed, served


@pytest.mark.parametrize("name", ["ngram", "mtp", "dspark"])
def test_watcher_proposals_after_a_hit_are_those_of_a_fresh_engine(name: str, drafting: dict[str, Drafting]) -> None:
    make = drafting[name]
    served = with_reuse(make.served(make.drafter()))
    prompts = [ids(50), (*ids(50), *ids(20, 1)), ids(60, 2), (*ids(50), *ids(31, 4))]
    for prompt in prompts:
        found, served = proposals(make, served, prompt)
        assert found and found == proposals(make, None, prompt)[0]
    assert served.prefixes.begun == 48


@pytest.mark.parametrize("name", ["mtp", "dspark"])
def test_negative_control_a_drafter_without_its_rows_is_caught_by_the_watcher(
    name: str, drafting: dict[str, Drafting], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = drafting[name]
    served = with_reuse(make.served(make.drafter()))
    state, own = served.parts.sequence, len(served.parts.model.cache_specs())
    positional = len([c for c in state.caches[:own] if isinstance(c, torch.Tensor)])
    put = state.put_rows
    monkeypatch.setattr(state, "put_rows", lambda start, rows: put(start, rows[:positional]))
    for prompt in (ids(70), ids(70, 2)):
        run(served, params(), prompt)
    found = [proposals(make, each, (*ids(70), *ids(9, 1)), 40)[0] for each in (served, None)]
    assert served.prefixes.begun >= 48 and found[0] != found[1]


# ---- negative controls ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["recurrence", "matrices", "rows", "key"])
def test_negative_control_a_stale_snapshot_is_caught(what: str) -> None:
    kind = "ling-flash"
    served, text = reusing(kind), ids(70)
    for prompt in (text, ids(70, 1), ids(70, 2)):
        check(served, without(kind), prompt, params())
    root = served.prefixes._roots[0]
    mine, other = (next(u for u in root.children.values() if u.key[0] == ids(1, seed)[0]) for seed in (0, 1))
    if what == "key":
        root.children[other.key] = mine
    elif what == "rows":
        mine.rows = other.rows
    else:
        last, stale = ([u for u in each.below() if u.recurrence is not None][-1] for each in (mine, other))
        assert last.recurrence is not None and stale.recurrence is not None
        if what == "recurrence":
            last.recurrence = stale.recurrence
        else:
            last.recurrence = replace(last.recurrence, matrices=stale.recurrence.matrices)
    with pytest.raises(AssertionError):
        check(served, without(kind), ids(70, 1) if what == "key" else text, params())


def test_negative_control_angles_that_depend_on_the_prompts_length_need_their_variant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = reusing("llama-dynamic")
    monkeypatch.setattr(served.parts.model, "variant", lambda base_length: 0)
    check(served, without("llama-dynamic"), ids(80), params())
    with pytest.raises(AssertionError):
        check(served, without("llama-dynamic"), (*ids(80), *ids(40, 1)), params())


# ---- any conversation -------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.integers(0, 3),  # which conversation goes on
        st.floats(0, 1),  # how much of its text is kept
        st.integers(0, 40),  # new tokens
        st.integers(1, 6),  # tokens to answer with
        st.integers(0, 9).filter(lambda n: n != 1),  # steps until the request is given up; most are not
    ),
    min_size=2,
    max_size=9,
)


def talk(served: Engine, fresh: Engine, steps: list[tuple[int, float, int, int, int]]) -> None:
    texts: list[tuple[int, ...]] = [()] * 4
    for turn, (which, kept, new, count, patience) in enumerate(steps):
        text = texts[which][: round(kept * len(texts[which]))] + ids(new, seed=turn % 3)
        prompt = (text or (1,))[:200]
        asked = params(count, seed=turn)
        if patience < 4:
            broken: Iterator[Any] = served.run(Request(prompt, (), asked))
            for _ in zip(range(patience), broken, strict=False):
                pass
            broken.close()  # type: ignore[attr-defined]
            assert_books(served.prefixes)
        texts[which] = (*prompt, *check(served, fresh, prompt, asked))


SHARES = st.sampled_from([PLENTY, 200_000, 60_000, 1])


@settings(max_examples=3, deadline=None, derandomize=True)
@given(steps=STEPS, share=SHARES)
@pytest.mark.parametrize("kind", ["ling-flash", "llama"])
def test_conversations_give_the_texts_of_fresh_engines(
    kind: str, steps: list[tuple[int, float, int, int, int]], share: int
) -> None:
    talk(reusing(kind, budget=share), without(kind), steps)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(steps=STEPS, share=SHARES)
@pytest.mark.parametrize("kind", ["ling-flash", "ling-tiny", "llama"])
def test_any_conversations_give_the_texts_of_fresh_engines(
    kind: str, steps: list[tuple[int, float, int, int, int]], share: int
) -> None:
    talk(reusing(kind, budget=share), without(kind), steps)


@settings(max_examples=3, deadline=None, derandomize=True)
@given(steps=STEPS)
@pytest.mark.parametrize("kind", ["ling-tiny", "qwen3-moe"])
def test_any_conversations_cut_inside_a_chunk(kind: str, steps: list[tuple[int, float, int, int, int]]) -> None:
    talk(reusing(kind, chunk=512), without(kind, chunk=512), [(a, b, 4 * c, d, e) for a, b, c, d, e in steps])


# ---- the Python API ---------------------------------------------------------------------------------------------------


def test_usage_says_what_was_not_computed() -> None:
    settings_of = {"context_length": 256, "prefill_chunk": CHUNK}
    with llms.fresh("ling-mtp", settings={**settings_of, "drafter": "mtp"}) as llm:
        off = llms.fresh("ling-mtp", settings={**settings_of, "prefix_cache_bytes": 0})
        text = list(ids(50))
        for turn in range(3):
            found, expected = llm.generate(text, params()), off.generate(text, params())
            assert found.token_ids == expected.token_ids
            assert expected.usage.cached_tokens == 0
            assert found.usage.cached_tokens == (0, 32, 48)[turn]
            assert replace(found.usage, cached_tokens=0) == expected.usage
            text += found.token_ids
        assert llm.plan.prefix_cache_bytes > 0 == off.plan.prefix_cache_bytes


def test_a_folder_with_a_tokenizer_talks_in_turns(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3", tokenizer=True)
    with LLM(str(folder), device="cpu") as llm:
        messages, before = [{"role": "user", "content": "Where does the river begin?"}], 0
        for turn in range(4):
            output = llm.generate(messages, params(20))
            assert output.usage.prompt_tokens - output.usage.cached_tokens <= output.usage.prompt_tokens - before + CUT
            before = output.usage.prompt_tokens
            messages += [{"role": "assistant", "content": output.text}, {"role": "user", "content": f"And {turn}?"}]
        assert output.usage.cached_tokens >= CUT
