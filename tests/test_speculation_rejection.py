"""Rejection sampling is lossless: texts have the model's own distribution, whatever drafted them and however badly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import pytest
import torch

from soloist.config import MAX_WINDOW, EngineConfig, SamplingParams
from soloist.drafters.width import FixedWidth
from soloist.errors import UserError
from soloist.layers.linear import prepare
from soloist.models.decoder import Decoder
from soloist.models.registry import read_config
from soloist.ops.noise import gumbel
from soloist.ops.rejection import pick_or_reject
from soloist.ops.truncate import truncate
from soloist.runtime.engine import Engine
from soloist.runtime.round import Parts
from soloist.state.buffers import Buffers
from soloist.state.sequence import Sequence
from soloist.testing.drafters import BigramDrafter
from soloist.weights.loader import model_slots
from tests import models, speculate
from tests.speculate import V, engine, plain, run, tokens

SMALL, LENGTH = 4, 4

Law = Callable[[tuple[int, ...]], Iterable[float]]
"""The distribution of the token after a text."""


def bigram(seed: int, scale: float) -> torch.Tensor:
    return torch.randn(SMALL, SMALL, generator=torch.Generator().manual_seed(seed)) * scale


def target_logits(top_k: int, top_p: float) -> torch.Tensor:
    table = bigram(1, 1.5)
    return truncate(table, torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([0.0]))


def enumerate_texts(law: Law, length: int) -> dict[tuple[int, ...], float]:
    """Probability of every possible text of `length` tokens."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        found = {
            (*text, token): chance * following
            for text, chance in found.items()
            for token, following in enumerate(law(text))
            if following > 0
        }
    return found


def exact(logits: torch.Tensor) -> dict[tuple[int, ...], float]:
    """Of the bigram target, after token 0."""
    laws = torch.softmax(logits.double(), -1).tolist()
    return enumerate_texts(lambda text: laws[text[-1] if text else 0], LENGTH)


def speculate_text(seed: int, logits: torch.Tensor, draft: torch.Tensor | None, width: int, honest: bool) -> list[int]:
    """Rounds of drafting and acceptance on the bigram target, as the engine runs them. draft None: always token 1."""
    text, rounds, key = [0], 0, torch.tensor([seed])
    while len(text) <= LENGTH:
        place = len(text)
        window, laws = [text[-1]], []
        noise = gumbel(place + torch.arange(width), key ^ BigramDrafter.NOISE, SMALL)
        for row in noise:
            if draft is None:
                window.append(1)
            else:
                laws.append(torch.softmax(draft[window[-1]], -1))
                window.append(int((laws[-1].log() + row * honest).argmax()))
        law = torch.stack(laws) if laws else None
        ids = torch.tensor(window)
        picks = pick_or_reject(logits[ids], ids, law, place + torch.arange(width + 1), key).tolist()
        kept = 0
        while kept < width and picks[kept] == window[kept + 1]:
            kept += 1
        text += picks[: kept + 1]
        rounds += 1
    return text[1 : LENGTH + 1]


def chi_square(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float], total: int) -> tuple[float, int]:
    """The statistic and its degrees of freedom; cells of fewer than five expected texts are pooled."""
    large = {text: chance * total for text, chance in law.items() if chance * total >= 5}
    rest = total - sum(large.values())
    statistic = sum((counts[text] - expected) ** 2 / expected for text, expected in large.items())
    if rest >= 5:
        others = total - sum(counts[text] for text in large)
        statistic += (others - rest) ** 2 / rest
    return statistic, len(large) - 1 + (rest >= 5)


def limit(freedom: int) -> float:
    """A chi-square above which one run in a hundred thousand falls (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.265 * (2 / (9 * freedom)) ** 0.5) ** 3


def batch(logits: torch.Tensor, draft: torch.Tensor | None, width: int, honest: bool) -> Counter[tuple[int, ...]]:
    return Counter(tuple(speculate_text(seed, logits, draft, width, honest)) for seed in range(1000))


DRAFTS = {"good": bigram(1, 1.5) + 0.3 * bigram(2, 1.0), "bad": -bigram(1, 1.5), "certain": None}


@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (3, 1.0), (0, 0.8)])
@pytest.mark.parametrize("quality", DRAFTS)
def test_texts_have_the_exact_distribution(quality: str, top_k: int, top_p: float) -> None:
    logits = target_logits(top_k, top_p)
    law = exact(logits)
    counts = batch(logits, DRAFTS[quality], 2, honest=True)
    assert set(counts) <= set(law), "a text that truncation rules out"
    statistic, freedom = chi_square(counts, law, counts.total())
    assert statistic < limit(freedom), (statistic, freedom)


def test_negative_control_likeliest_drafts_said_to_be_drawn_are_caught() -> None:
    """The classic mistake: the draft is the argmax of q, and acceptance believes it was drawn from q."""
    logits = target_logits(0, 1.0)
    counts = batch(logits, DRAFTS["good"], 2, honest=False)
    statistic, freedom = chi_square(counts, exact(logits), counts.total())
    assert statistic > limit(freedom)


TEMPERATURE, TOP_P, TOP_K = 0.8, 0.9, 4


def small_engine(drafter: BigramDrafter) -> Engine:
    """A model of one layer and SMALL tokens."""
    config = {**models.QWEN3, "vocab_size": SMALL, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    model = Decoder(read_config(config), torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(2)
    for slot in model_slots(model).values():
        slot.copy_(torch.randn(slot.shape, generator=generator) * (0.15 if slot.dim() > 1 else 1.0))
    prepare(model)
    state = Sequence(model.cache_specs(), 32, MAX_WINDOW, torch.device("cpu"))
    bufs = Buffers(SMALL, 32 + MAX_WINDOW + 1, torch.device("cpu"))
    return Engine(Parts(model, state, bufs, drafter), SMALL, 512, FixedWidth(drafter.width), rejection=True)


@pytest.mark.parametrize("quality", ["good", "bad"])
def test_the_engine_emits_the_models_own_distribution(quality: str) -> None:
    served = small_engine(BigramDrafter(bigram(5, 1.0 if quality == "good" else 6.0), 2))

    def law(text: tuple[int, ...]) -> list[float]:
        logits = served.logits((0, 1, *text))[-1:] / TEMPERATURE
        kept = truncate(logits, torch.tensor([TOP_K]), torch.tensor([TOP_P]), torch.tensor([0.0]))
        return torch.softmax(kept.double(), -1)[0].tolist()

    expected = enumerate_texts(law, 3)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(700):
        asked = SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, top_k=TOP_K, seed=seed, max_tokens=3)
        counts[tuple(tokens(run(served, asked, (0, 1))))] += 1
    assert set(counts) <= set(expected) and len(expected) > 20
    statistic, freedom = chi_square(counts, expected, counts.total())
    assert statistic < limit(freedom), (statistic, freedom)


def test_greedy_rejection_is_plain_greedy_decoding() -> None:
    asked = SamplingParams(temperature=0.0, max_tokens=20)
    answer = plain("llama", asked)
    for name, make in speculate.DRAFTERS.items():
        assert tokens(run(engine("llama", make(answer, 5), rejection=True), asked)) == answer, name


def test_the_same_seed_gives_the_same_text_and_requests_parameters_hold() -> None:
    served = engine("llama", speculate.DRAFTERS["ngram"]([], 4), rejection=True)
    texts = []
    for seed in (3, 3, 4):
        asked = SamplingParams(temperature=1.0, seed=seed, max_tokens=24, logit_bias={7: -100.0}, stop_token_ids=[9])
        texts.append(tokens(run(served, asked)))
    assert texts[0] == texts[1] != texts[2]
    for text in texts:
        assert 7 not in text and 9 not in text[:-1]


def test_what_was_drafted_with_the_targets_own_law_is_always_accepted() -> None:
    logits = torch.randn(6, V, generator=torch.Generator().manual_seed(0)) * 3
    law = torch.softmax(logits, -1)
    for seed in range(200):
        window = torch.cat((torch.tensor([0]), torch.multinomial(law[:-1], 1)[:, 0]))
        picks = pick_or_reject(logits, window, law, torch.arange(6), torch.tensor([seed]))
        assert torch.equal(picks[:-1], window[1:])


def test_rejection_without_a_drafter_is_refused() -> None:
    with pytest.raises(UserError, match="nothing to reject; choose a drafter"):
        EngineConfig("x", drafter="none", acceptance="rejection")
    with pytest.raises(UserError, match="acceptance='maybe' is not one of equality, rejection"):
        EngineConfig("x", drafter="ngram", acceptance="maybe")
