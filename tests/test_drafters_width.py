"""The choice of width finds the best one, and can never make decoding slower than plain by more than it may."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from soloist.drafters.width import (
    ALLOWANCE,
    MOST_CREDIT,
    START_CREDIT,
    AutoWidth,
    FixedWidth,
    RoundCosts,
    Survival,
    WidthChoice,
)
from soloist.ops.choose_width import choose_width
from soloist.state.buffers import Buffers

PLAIN_MS = 10.0


def cheap(width: int) -> float:
    return PLAIN_MS * (1 + 0.05 * width)


def steep(width: int) -> float:
    return PLAIN_MS * (1 + 0.5 * width)


def stairs(width: int) -> float:
    return PLAIN_MS * (1 if width == 0 else 1.3 if width <= 3 else 2.5)


def decode(
    choice: WidthChoice,
    tokens: int,
    cost: Callable[[int], float],
    accepted: Callable[[int, int], bool],
    confidence: Callable[[int], list[float] | None] = lambda done: None,
    lag: int = 0,
    noise: float = 0.0,
) -> tuple[float, list[int]]:
    """Milliseconds and widths of decoding so many tokens. accepted(tokens done, place) judges a draft; the choice hears
    of a round `lag` rounds late.
    """
    draw = random.Random(1)
    choice.begin(confidence(0))
    done, total, widths, unheard = 0, 0.0, [], []
    while done < tokens:
        width = choice.choose()
        emitted = 1
        while emitted <= width and accepted(done, emitted - 1):
            emitted += 1
        ms = cost(width) * (1 + noise * draw.random())
        done, total = done + emitted, total + ms
        widths.append(width)
        unheard.append((width, width, emitted, True, ms, confidence(done)))
        if len(unheard) > lag:
            choice.learn(*unheard.pop(0))
    return total, widths


def best_fixed(tokens: int, cost: Callable[[int], float], make: Callable[[], Callable[[int, int], bool]]) -> float:
    return min(decode(FixedWidth(w), tokens, cost, make())[0] for w in range(16))


def bernoulli(chance: float) -> Callable[[], Callable[[int, int], bool]]:
    def make() -> Callable[[int, int], bool]:
        draw = random.Random(7)
        return lambda done, place: draw.random() < chance

    return make


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("cost", [cheap, steep, stairs])
def test_the_choice_is_nearly_as_fast_as_the_best_width(cost: Callable[[int], float], chance: float, lag: int) -> None:
    best = best_fixed(3000, cost, bernoulli(chance))
    found, _ = decode(AutoWidth(15), 3000, cost, bernoulli(chance)(), lag=lag, noise=0.05)
    assert found <= best * 1.12


def test_negative_control_a_bad_fixed_width_is_far_from_the_best() -> None:
    best = best_fixed(3000, steep, bernoulli(0.3))
    found, _ = decode(FixedWidth(15), 3000, steep, bernoulli(0.3)())
    assert found > best * 1.12


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("tokens", [50, 400, 3000])
@pytest.mark.parametrize("lie", [None, 1.0])
def test_drafting_for_nothing_costs_no_more_than_the_credit_and_the_allowance(
    lie: float | None, tokens: int, lag: int
) -> None:
    """A drafter that is never right, and one that swears it is: the bound does not rest on estimates."""
    said = None if lie is None else [lie] * 15
    for cost in (cheap, steep, stairs):
        found, widths = decode(AutoWidth(15, True), tokens, cost, lambda done, place: False, lambda done: said, lag)
        assert found / PLAIN_MS <= tokens * (1 + ALLOWANCE) + START_CREDIT
        assert any(widths), "nothing was ever tried"


@pytest.mark.parametrize("cost", [cheap, steep, stairs])
def test_short_answers_together_cost_no_more_than_the_credit_and_the_allowance(cost: Callable[[int], float]) -> None:
    """Also after a long one that was copied whole: what it won is not theirs to lose."""
    choice = AutoWidth(15, True)
    decode(choice, 400, cost, lambda done, place: True, lambda done: [0.95] * 15)
    assert choice.credit > 4 * START_CREDIT
    tokens, answers, drafted = 16, 25, 0
    total = 0.0
    for _ in range(answers):
        found, widths = decode(choice, tokens, cost, lambda done, place: False, lambda done: [0.95] * 15)
        total, drafted = total + found, drafted + sum(widths)
    assert total / PLAIN_MS <= tokens * answers * (1 + ALLOWANCE) + START_CREDIT
    assert drafted, "nothing was ever tried"


def test_after_answers_that_were_not_to_be_guessed_one_that_is_will_be() -> None:
    choice = AutoWidth(15, True)
    for _ in range(20):
        decode(choice, 16, steep, lambda done, place: False, lambda done: [0.95] * 15)
    found, _ = decode(choice, 400, steep, lambda done, place: True, lambda done: [0.95] * 15)
    assert found < 0.6 * 400 * PLAIN_MS


def test_a_turn_of_the_text_costs_at_most_what_drafting_had_won() -> None:
    turn = 1500
    choice = AutoWidth(15)
    found, _ = decode(choice, 3000, steep, lambda done, place: done < turn and random.random() < 0.95)
    assert found <= PLAIN_MS * 3000
    assert choice.credit <= MOST_CREDIT


def test_what_was_given_up_is_tried_again() -> None:
    _, widths = decode(AutoWidth(15), 4000, cheap, lambda done, place: done > 1500)
    late = widths[-50:]
    assert sum(late) / len(late) > 10


def test_confidence_decides_round_by_round() -> None:
    """A drafter that knows when it is right, like prompt lookup, is used just then."""
    sure = [0.95] * 15
    unsure = [0.0] * 15

    def copies(done: int) -> bool:
        return (done // 100) % 2 == 1

    found, widths = decode(
        AutoWidth(15, foresees=True), 4000, stairs, lambda done, place: copies(done + place),
        lambda done: sure if copies(done) else unsure,
    )  # fmt: skip
    assert widths.count(0) > 1900
    assert found < 0.65 * 4000 * PLAIN_MS


def test_confidence_is_corrected_by_experience() -> None:
    survival = Survival(3)
    for _ in range(100):
        survival.learn([0.9] * 3, 3, 1)  # the first is always right, the second never
    first, second, third = survival.conditional([0.9] * 3)
    assert first > 0.97 and second < 0.06 and third < 0.06
    assert survival.conditional([0.0] * 3) == [0.0] * 3
    for _ in range(600):
        survival.learn(None, 0, 0)
    assert survival.conditional([0.9] * 3) == pytest.approx([0.9] * 3, abs=0.02)


def test_costs_are_medians_and_what_never_ran_is_interpolated() -> None:
    costs = RoundCosts()
    for ms in (10.0, 11.0, 90.0, 10.0, 11.0):
        costs.learn(0, ms)
    costs.learn(4, 15.0)
    assert costs[0] == 11.0 and costs[4] == 15.0 and costs[2] == 13.0
    assert costs[8] == pytest.approx(15.0 * (1 + 4 * RoundCosts.SLOPE))
    assert costs.at_most(1) == 15.0 and costs.at_most(9) == 30.0
    for _ in range(RoundCosts.AGE + 1):
        costs.learn(0, 20.0)
    assert costs.measured(4) is None and costs[0] == 20.0


def test_the_first_round_and_every_so_many_are_plain_to_know_what_drafting_is_worth() -> None:
    choice = AutoWidth(15, refresh=20)
    assert choice.plain_ms is None
    _, widths = decode(choice, 4000, cheap, lambda done, place: True)
    plain = [index for index, width in enumerate(widths) if width == 0]
    assert plain[0] == 0 and choice.plain_ms == PLAIN_MS
    assert max(b - a for a, b in zip(plain, plain[1:], strict=False)) <= 21
    assert len(plain) <= len(widths) / 20 + 2


def trimmed(
    choice: WidthChoice, tokens: int, cost: Callable[[int], float], saved: float, knows: bool = True
) -> tuple[float, list[tuple[int, int]]]:
    """Milliseconds, and (drafted, verified) of every round, of a drafter that is nearly always right or nearly never, from
    round to round, and knows which it is. The choice hears of a round one late; the round itself goes by what it was told.

    saved: of the time between the drafted width and the verified one.
    """
    draw, bufs = random.Random(3), Buffers(2, 2, torch.device("cpu"))
    choice.begin([0.5] * 15)
    done, total, widths, unheard = 0, 0.0, [], []
    while done < tokens:
        width, told, chance = choice.choose(), choice.tell(), draw.choice((0.95, 0.1))
        if told is not None:
            bufs.tell(*told)
        said = torch.full((15,), chance if knows else 0.5)
        rows = choose_width(said, bufs.factors, bufs.costs, bufs.saved, width) if choice.adapts and width else width + 1
        verified, emitted = int(rows) - 1, 1
        while emitted <= verified and draw.random() < chance:
            emitted += 1
        ms = cost(width) - saved * (cost(width) - cost(verified))
        done, total = done + emitted, total + ms
        widths.append((width, verified))
        unheard.append((width, verified, emitted, True, ms, said.tolist()))
        if len(unheard) > 1:
            choice.learn(*unheard.pop(0))
    return total, widths


@pytest.mark.parametrize("cost", [cheap, steep, stairs])
def test_verifying_what_the_drafts_of_the_round_are_worth_beats_every_fixed_width(cost: Callable[[int], float]) -> None:
    best = min(trimmed(FixedWidth(width), 2000, cost, 0.8)[0] for width in range(16))
    found, widths = trimmed(AutoWidth(15), 2000, cost, 0.8)
    assert found < best * 0.97
    assert len({verified for width, verified in widths if width}) > 2


def test_negative_control_a_drafter_that_does_not_know_gains_nothing() -> None:
    best = min(trimmed(FixedWidth(width), 2000, cheap, 0.8)[0] for width in range(16))
    assert trimmed(AutoWidth(15), 2000, cheap, 0.8, knows=False)[0] > best * 0.97


def test_what_is_drafted_is_verified_where_leaving_it_out_saves_nothing() -> None:
    choice = AutoWidth(15)
    _, widths = trimmed(choice, 3000, steep, 0.0)
    assert choice.savings.share == 0.0
    assert sum(width != verified for width, verified in widths) < 30


def test_the_share_that_is_saved_is_measured() -> None:
    choice = AutoWidth(15)
    trimmed(choice, 1500, cheap, 0.6)
    assert choice.savings.share == pytest.approx(0.6, abs=0.05)


def test_near_ties_do_not_make_the_width_flicker() -> None:
    _, widths = decode(AutoWidth(15), 6000, cheap, bernoulli(0.85)(), noise=0.03)
    settled = [width for width in widths[100:] if width]
    changes = sum(a != b for a, b in zip(settled, settled[1:], strict=False))
    assert changes < len(settled) / 5


def test_a_drafter_that_does_not_foresee_is_not_stuck_with_what_it_last_said() -> None:
    """It speaks of the last proposal, so after a plain round nothing is known of the next."""
    choice = AutoWidth(15)
    said = {"last": [0.05] * 15}
    choice.begin(None)
    widths = []
    for _ in range(300):
        widths.append(choice.choose())
        choice.learn(widths[-1], widths[-1], widths[-1] + 1, True, cheap(widths[-1]), said["last"])
    assert sum(width > 0 for width in widths) > 100
