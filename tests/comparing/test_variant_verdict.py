"""What is said of an arm, and when nothing may be said."""

import numpy as np
import pytest

from thrifty.comparing.paired_statistics import smallest_effect
from thrifty.comparing.variant_verdict import judge

PAIRS = 8


def losses(random: np.random.Generator, effect: float, spread: float = 0.02) -> tuple[list[float], list[float]]:
    """A baseline and an arm whose pairs share what their seed does; effect and spread as shares of the loss."""
    shared = 2 + 0.1 * random.normal(size=PAIRS)
    own = random.normal(size=(2, PAIRS)) * 2 * spread / np.sqrt(2)
    return (shared + own[0]).tolist(), (shared + own[1] + 2 * effect).tolist()


def share_of_equals_that_differ(races: int, seed: int) -> float:
    random = np.random.default_rng(seed)
    return sum(judge(*losses(random, 0.0)).verdict != "no difference" for _ in range(races)) / races


def test_of_200_races_of_equals_at_least_95_percent_say_no_difference() -> None:
    assert share_of_equals_that_differ(200, seed=1) <= 0.05


def losses_on_mistimed_budgets(random: np.random.Generator, effect: float) -> tuple[list[float], list[float], float]:
    """Losses that fall by 1 per factor e of budget; one pilot error of 2 % for all pairs; what was used, as timed."""
    error = 0.02 * random.normal()
    baseline, variant = losses(random, effect, spread=0.002)
    return baseline, [loss - np.log1p(error) for loss in variant], (1 + error) * (1 + 0.001 * random.normal())


def words_on_mistimed_budgets(effect: float, slope: float = 1.0) -> list[str]:
    random = np.random.default_rng(3)
    races = (losses_on_mistimed_budgets(random, effect) for _ in range(200))
    return [judge(baseline, variant, used=used, slope=slope).verdict for baseline, variant, used in races]


def test_a_pilot_error_that_all_pairs_share_is_no_finding() -> None:
    found = words_on_mistimed_budgets(effect=0.0)
    assert found.count("better") + found.count("worse") <= 0.03 * 200
    assert words_on_mistimed_budgets(0.0, slope=0.0).count("no difference") < 100  # what the margin is for


def test_an_effect_larger_than_the_pilot_error_is_found_nevertheless() -> None:
    found = words_on_mistimed_budgets(effect=0.04)
    assert found.count("worse") >= 0.9 * 200 and "better" not in found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("used", [0.96, 0.99, 1.0, 1.01, 1.04])
def test_a_verdict_never_contradicts_its_interval_and_p(used: float) -> None:
    random = np.random.default_rng(4)
    for effect in (-0.03, -0.01, 0.0, 0.01, 0.03):
        found = judge(*losses(random, effect, spread=0.004), used=used, slope=1.0)
        test = found.found
        assert (test.p <= found.alpha and test.low > 0) == (found.verdict == "worse")
        assert (test.p <= found.alpha and test.high < 0) == (found.verdict == "better")
        assert test.high - test.low >= 2 * abs(used - 1)


def test_a_finding_below_the_effect_asked_about_is_said_to_be_smaller_than_worth_knowing() -> None:
    random = np.random.default_rng(5)
    sentences = [judge(*losses(random, effect, spread=0.001), effect=0.01).sentence for effect in (0.005, 0.02)]
    assert ["smaller than the 1 % of min_effect" in sentence for sentence in sentences] == [True, False]


@pytest.mark.slow
def test_of_many_races_of_equals_97_percent_say_no_difference() -> None:
    """So that 200 of them hardly ever have more than 5 % that differ."""
    assert share_of_equals_that_differ(4000, seed=2) <= 0.03


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("sign", "word"), [(1, "worse"), (-1, "better")])
def test_a_planted_effect_of_5_percent_is_found_as_often_as_stated(sign: int, word: str) -> None:
    random = np.random.default_rng(1)
    spread = 0.05 / smallest_effect(PAIRS)
    words = [judge(*losses(random, sign * 0.05, spread)).verdict for _ in range(150)]
    assert 0.73 <= words.count(word) / 150 <= 0.87
    assert set(words) <= {word, "no difference"}


def test_too_few_pairs_have_no_verdict_however_large_the_effect() -> None:
    found = judge([2.0, 2.1, 2.2], [1.0, 1.1, 1.3])
    assert found.verdict == "undecided" and found.least_pairs == 7
    assert "3 pairs" in found.sentence and "takes 7" in found.sentence


def test_several_arms_share_the_chance_of_a_finding() -> None:
    baseline, arm = [2.0, 2.1, 2.2, 1.9, 2.0, 2.1, 2.0], [1.0, 1.1, 1.3, 1.0, 1.1, 1.2, 1.0]
    assert judge(baseline, arm).verdict == "better"
    assert judge(baseline, arm, variants=2).verdict == "undecided"
    assert judge([*baseline, 2.0], [*arm, 1.0], variants=2).verdict == "better"


def test_a_failed_run_is_not_dropped() -> None:
    baseline = [2.0 + 0.01 * seed for seed in range(PAIRS)]
    found = judge(baseline, [*(loss - 0.5 for loss in baseline[1:]), None])
    assert found.verdict == "undecided" and found.failed == 1 and "1 of 8 pairs failed" in found.sentence
    assert judge(baseline, [None] * PAIRS).sentence == "undecided: all 8 pairs failed"


@pytest.mark.parametrize(
    ("effect", "used", "word"),
    [(-0.5, 1.3, "undecided"), (-0.5, 0.7, "better"), (0.5, 0.7, "undecided"), (0.5, 1.3, "worse")],
)
def test_what_a_budget_that_was_not_equal_could_explain_is_no_finding(effect: float, used: float, word: str) -> None:
    baseline = [2.0 + 0.01 * seed for seed in range(PAIRS)]
    found = judge(baseline, [loss + effect + 0.001 * loss**2 for loss in baseline], used=used)
    assert found.verdict == word
    assert ("it used" in found.sentence) == (word == "undecided")


def test_no_difference_says_what_could_have_been_seen_and_what_seeds_the_effect_asked_about_needs() -> None:
    found = judge(*losses(np.random.default_rng(2), 0.0), effect=0.001)
    assert found.verdict == "no difference" and found.pairs_needed > PAIRS
    assert "would be found in 80 %" in found.sentence and f"with {found.pairs_needed} pairs" in found.sentence


def test_bitwise_equals_are_called_so() -> None:
    found = judge([2.0] * PAIRS, [2.0] * PAIRS)
    assert found.verdict == "no difference" and "equal to the last bit" in found.sentence


def test_of_a_metric_that_is_better_when_higher_the_higher_variant_is_better() -> None:
    low, high = [0.5 + 0.001 * seed for seed in range(8)], [0.6 + 0.0011 * seed for seed in range(8)]
    found = judge(low, high, judged="accuracy", is_lower_better=False)
    assert found.verdict == "better" and "held-out accuracy higher by" in found.sentence
    assert judge(high, low, judged="accuracy", is_lower_better=False).verdict == "worse"
