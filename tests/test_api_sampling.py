"""Every sampling parameter does what it says, checked against the model's own logits and naive arithmetic in numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from soloist import LLM, SamplingParams
from tests import llms
from tests.llms import GREEDY, PROMPT

KINDS = ("ling-flash", "llama")


@pytest.fixture(params=KINDS)
def llm(request: pytest.FixtureRequest) -> LLM:
    return llms.shared(request.param)


def logits_before_each(llm: LLM, ids: list[int]) -> np.ndarray:
    """The model's logits at the place of every generated id: [len(ids), V] fp64."""
    return llm.logits([*PROMPT, *ids[:-1]])[len(PROMPT) - 1 :].double().numpy()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("count", [0, 1, 5, 20])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_the_models_own_distribution(llm: LLM, temperature: float, count: int) -> None:
    """Before any processor: the bias and the penalty must not show."""
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=8, ignore_eos=True, logprobs=count,
                            logit_bias={4: 3.0}, presence_penalty=1.0)  # fmt: skip
    out = llm.generate(PROMPT, params)
    assert out.logprobs is not None and len(out.logprobs) == 8
    expected = log_softmax(logits_before_each(llm, out.token_ids))
    for token, given, row in zip(out.token_ids, out.logprobs, expected, strict=True):
        assert given.token_id == token and given.logprob == pytest.approx(row[token], abs=1e-4)
        best = np.argsort(-row, kind="stable")[:count]
        assert list(given.top) == best.tolist()
        assert list(given.top.values()) == pytest.approx(row[best].tolist(), abs=1e-4)


def test_no_logprobs_unless_asked_for(llm: LLM) -> None:
    assert llm.generate(PROMPT, GREEDY).logprobs is None


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_a_bias_of_100_forces_a_token_and_minus_100_bans_it(llm: LLM, temperature: float) -> None:
    base = {"temperature": temperature, "seed": 2, "max_tokens": 10, "ignore_eos": True}
    assert llm.generate(PROMPT, SamplingParams(**base, logit_bias={33: 100.0})).token_ids == [33] * 10
    free = llm.generate(PROMPT, SamplingParams(**base)).token_ids
    banned = llm.generate(PROMPT, SamplingParams(**base, logit_bias=dict.fromkeys(free, -100.0))).token_ids
    assert not set(banned) & set(free)


@pytest.mark.parametrize(
    "penalties",
    [{"presence_penalty": 0.7}, {"frequency_penalty": 0.4}, {"frequency_penalty": -1.0}, {"repetition_penalty": 1.3},
     {"repetition_penalty": 0.7}, {"presence_penalty": -0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}],
)  # fmt: skip
def test_penalties_equal_the_naive_ones(llm: LLM, penalties: dict[str, float]) -> None:
    out = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, **penalties))
    raw = logits_before_each(llm, out.token_ids)
    for i, token in enumerate(out.token_ids):
        row = naive_penalties(raw[i].copy(), out.token_ids[:i], **penalties)
        assert row[token] >= row.max() - 1e-4, (i, token, int(row.argmax()))


def test_negative_control_penalties_change_the_answer(llm: LLM) -> None:
    for name, value in (("presence_penalty", 2.0), ("frequency_penalty", -2.0), ("repetition_penalty", 2.0)):
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **{name: value})
        plain = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        assert llm.generate(PROMPT, params).token_ids != llm.generate(PROMPT, plain).token_ids, name


def naive_penalties(
    row: np.ndarray, said: list[int], presence_penalty: float = 0, frequency_penalty: float = 0,
    repetition_penalty: float = 1,
) -> np.ndarray:  # fmt: skip
    """OpenAI's penalties count what was said; CTRL's looks at the prompt as well, and comes first."""
    for token in {*PROMPT, *said}:
        row[token] = row[token] / repetition_penalty if row[token] > 0 else row[token] * repetition_penalty
    for token in set(said):
        row[token] -= presence_penalty + frequency_penalty * said.count(token)
    return row


def test_the_same_seed_gives_the_same_answer_and_others_do_not(llm: LLM) -> None:
    def answer(seed: int | None) -> tuple[int, ...]:
        return tuple(llm.generate(PROMPT, SamplingParams(seed=seed, max_tokens=12, ignore_eos=True)).token_ids)

    seeds = [0, 1, 2, -1, 1 << 40, (1 << 63) - 1, -(1 << 63)]
    answers = [answer(seed) for seed in seeds]
    assert answers == [answer(seed) for seed in seeds]
    assert len(set(answers)) == len(seeds)
    assert len({answer(None) for _ in range(4)}) == 4


@pytest.mark.parametrize(
    "params",
    [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-4}, {"temperature": 1e-9},
     {"temperature": 1e-50}, {"temperature": 1e-50, "top_p": 0.9, "top_k": 5}, {"temperature": 1e6, "top_k": 1}],
)  # fmt: skip
def test_the_limits_of_sampling_are_greedy(llm: LLM, params: dict[str, Any]) -> None:
    out = llm.generate(PROMPT, SamplingParams(seed=5, max_tokens=12, ignore_eos=True, **params))
    assert out.token_ids == llms.greedy_ids(kind_of(llm))


LAWS: list[dict[str, Any]] = [
    {}, {"temperature": 0.6}, {"temperature": 1.7}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.3},
    {"temperature": 1.4, "top_k": 6, "top_p": 0.8, "min_p": 0.1}, {"logit_bias": {2: 1.5}},
    {"repetition_penalty": 1.8},
]  # fmt: skip
SHORT = [1, 7, 4]
DRAWS = 500


@pytest.fixture(scope="module")
def first_logits() -> np.ndarray:
    return llms.small().logits(SHORT)[-1].double().numpy()


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_first_tokens_are_distributed_as_the_parameters_say(law: dict[str, Any], first_logits: np.ndarray) -> None:
    counts = drawn(law, first=0)
    expected = naive_distribution(first_logits, **law)
    assert not counts[expected == 0].any()
    assert chi_square_excess(counts, expected) < 4


def test_later_tokens_are_distributed_as_the_model_says() -> None:
    """The second token, given the most frequent first one."""
    ids = [two(seed) for seed in range(DRAWS)]
    first = max(range(12), key=[a for a, _ in ids].count)
    counts = np.bincount([b for a, b in ids if a == first], minlength=12)
    logits = llms.small().logits([*SHORT, first])[-1].double().numpy()
    assert counts.sum() > 60 and chi_square_excess(counts, naive_distribution(logits)) < 4


def test_negative_control_another_temperature_or_top_p_is_told_apart(first_logits: np.ndarray) -> None:
    counts = drawn({}, first=0)
    assert chi_square_excess(counts, naive_distribution(first_logits, temperature=0.6)) > 8
    assert chi_square_excess(counts, naive_distribution(first_logits, temperature=1.7)) > 8
    assert chi_square_excess(counts, naive_distribution(first_logits, logit_bias={2: 1.5})) > 8
    assert counts[naive_distribution(first_logits, top_p=0.7) == 0].any()


def drawn(law: dict[str, Any], first: int) -> np.ndarray:
    """How often each of the twelve tokens comes first, over DRAWS seeds."""
    llm = llms.small()
    seeds = range(first, first + DRAWS)
    ids = [llm.generate(SHORT, SamplingParams(seed=s, max_tokens=1, **law)).token_ids[0] for s in seeds]
    return np.bincount(ids, minlength=12)


def two(seed: int) -> tuple[int, int]:
    out = llms.small().generate(SHORT, SamplingParams(seed=seed, max_tokens=2, ignore_eos=True))
    return out.token_ids[0], out.token_ids[1]


def naive_distribution(
    logits: np.ndarray, temperature: float = 1, top_k: int = 0, top_p: float = 1, min_p: float = 0,
    logit_bias: dict[int, float] | None = None, repetition_penalty: float = 1,
) -> np.ndarray:  # fmt: skip
    """Bias, penalty, temperature, then top_k, top_p and min_p, each on what the one before has left."""
    row = logits.copy()
    for token, value in (logit_bias or {}).items():
        row[token] += value
    for token in set(SHORT) if repetition_penalty != 1 else ():
        row[token] = row[token] / repetition_penalty if row[token] > 0 else row[token] * repetition_penalty
    probs = np.exp(log_softmax(row / temperature))
    order = np.argsort(-probs, kind="stable")
    probs[order[top_k or len(probs) :]] = 0
    probs /= probs.sum()
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[(before >= top_p) & (np.arange(len(probs)) > 0)]] = 0
    probs[probs < min_p * probs.max()] = 0
    return probs / probs.sum()


def chi_square_excess(counts: np.ndarray, expected: np.ndarray) -> float:
    """Pearson's statistic above its mean, in its standard deviations; rare tokens are taken together."""
    means = expected * counts.sum()
    common = means >= 5
    seen = [*counts[common], counts[~common].sum()]
    hoped = [*means[common], means[~common].sum()]
    pairs = [(s, h) for s, h in zip(seen, hoped, strict=True) if h > 0]
    if any(s for s, h in zip(seen, hoped, strict=True) if h == 0):
        return math.inf
    degrees = len(pairs) - 1
    if degrees == 0:
        return 0.0
    return (sum((s - h) ** 2 / h for s, h in pairs) - degrees) / math.sqrt(2 * degrees)


def kind_of(llm: LLM) -> str:
    return next(kind for kind in KINDS if llms.shared(kind) is llm)
