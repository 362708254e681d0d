"""Verdicts on a variant, and conditions without a verdict."""

import numpy as np
import pytest

from thrifty.comparing.paired_statistics import smallest_effect
from thrifty.comparing.variant_verdict import judge

PAIRS = 8


def losses(random: np.random.Generator, effect: float, spread: float = 0.02) -> tuple[list[float], list[float]]:
    """Return losses of a baseline and a variant with a shared seed effect; `effect` and `spread` are relative."""
    shared = 2 + 0.1 * random.normal(size=PAIRS)
    own = random.normal(size=(2, PAIRS)) * 2 * spread / np.sqrt(2)
    return (shared + own[0]).tolist(), (shared + own[1] + 2 * effect).tolist()


def false_finding_rate(comparisons: int, seed: int) -> float:
    random = np.random.default_rng(seed)
    return sum(judge(*losses(random, 0.0)).verdict != "no difference" for _ in range(comparisons)) / comparisons


def test_at_most_5_percent_of_equal_comparisons_differ() -> None:
    assert false_finding_rate(200, seed=1) <= 0.05


def losses_on_mistimed_budgets(random: np.random.Generator, effect: float) -> tuple[list[float], list[float], float]:
    """Return losses with one pilot error of 2 % for all pairs, and the measured used budget.

    Losses fall by 1 when the budget grows by a factor of e.
    """
    error = 0.02 * random.normal()
    baseline, variant = losses(random, effect, spread=0.002)
    return baseline, [loss - np.log1p(error) for loss in variant], (1 + error) * (1 + 0.001 * random.normal())

    assert words_on_mistimed_budgets(0.0, slope=0.0).count("no difference") < 100  # without the margin


def words_on_mistimed_budgets(effect: float, slope: float = 1.0) -> list[str]:
    random = np.random.default_rng(3)
    comparisons = (losses_on_mistimed_budgets(random, effect) for _ in range(200))
    return [judge(baseline, variant, used=used, slope=slope).verdict for baseline, variant, used in comparisons]


def test_shared_pilot_error_is_no_finding() -> None:
    result = words_on_mistimed_budgets(effect=0.0)
    assert result.count("better") + result.count("worse") <= 0.03 * 200
    assert words_on_mistimed_budgets(0.0, slope=0.0).count("no difference") < 100  # without the margin


def test_effect_above_the_pilot_error_is_found() -> None:
    result = words_on_mistimed_budgets(effect=0.04)
    assert result.count("worse") >= 0.9 * 200 and "better" not in result


@pytest.mark.sampled(2)
@pytest.mark.parametrize("used", [0.96, 0.99, 1.0, 1.01, 1.04])
def test_verdict_agrees_with_interval_and_p(used: float) -> None:
    random = np.random.default_rng(4)
    for effect in (-0.03, -0.01, 0.0, 0.01, 0.03):
        result = judge(*losses(random, effect, spread=0.004), used=used, slope=1.0)
        test = result.found
        assert (test.p <= result.alpha and test.low > 0) == (result.verdict == "worse")
        assert (test.p <= result.alpha and test.high < 0) == (result.verdict == "better")
        assert test.high - test.low >= 2 * abs(used - 1)


def test_finding_below_min_effect_is_marked() -> None:
    random = np.random.default_rng(5)
    sentences = [judge(*losses(random, effect, spread=0.001), effect=0.01).sentence for effect in (0.005, 0.02)]
    assert ["smaller than 1 % (min_effect)" in sentence for sentence in sentences] == [True, False]


@pytest.mark.slow
def test_97_percent_of_many_equal_comparisons_do_not_differ() -> None:
    """At this rate, a series of 200 comparisons almost never reports more than 5 % differences."""
    assert false_finding_rate(4000, seed=2) <= 0.03


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("sign", "word"), [(1, "worse"), (-1, "better")])
def test_simulated_effect_is_found_with_the_stated_power(sign: int, word: str) -> None:
    random = np.random.default_rng(1)
    spread = 0.05 / smallest_effect(PAIRS)
    words = [judge(*losses(random, sign * 0.05, spread)).verdict for _ in range(150)]
    assert 0.73 <= words.count(word) / 150 <= 0.87
    assert set(words) <= {word, "no difference"}


def test_too_few_pairs_have_no_verdict() -> None:
    result = judge([2.0, 2.1, 2.2], [1.0, 1.1, 1.3])
    assert result.verdict == "undecided" and result.least_pairs == 7
    assert "3 pairs" in result.sentence and "requires 7" in result.sentence


def test_several_variants_share_the_significance_level() -> None:
    baseline, variant_losses = [2.0, 2.1, 2.2, 1.9, 2.0, 2.1, 2.0], [1.0, 1.1, 1.3, 1.0, 1.1, 1.2, 1.0]
    assert judge(baseline, variant_losses).verdict == "better"
    assert judge(baseline, variant_losses, variants=2).verdict == "undecided"
    assert judge([*baseline, 2.0], [*variant_losses, 1.0], variants=2).verdict == "better"


def test_failed_run_is_not_dropped() -> None:
    baseline = [2.0 + 0.01 * seed for seed in range(PAIRS)]
    result = judge(baseline, [*(loss - 0.5 for loss in baseline[1:]), None])
    assert result.verdict == "undecided" and result.failed == 1 and "1 of 8 pairs failed" in result.sentence
    assert judge(baseline, [None] * PAIRS).sentence == "undecided: all 8 pairs failed"


@pytest.mark.parametrize(
    ("effect", "used", "word"),
    [(-0.5, 1.3, "undecided"), (-0.5, 0.7, "better"), (0.5, 0.7, "undecided"), (0.5, 1.3, "worse")],
)
def test_difference_from_an_unequal_budget_is_undecided(effect: float, used: float, word: str) -> None:
    baseline = [2.0 + 0.01 * seed for seed in range(PAIRS)]
    result = judge(baseline, [loss + effect + 0.001 * loss**2 for loss in baseline], used=used)
    assert result.verdict == word
    assert (", but the variant used" in result.sentence) == (word == "undecided")


@pytest.mark.parametrize(("used", "is_warned"), [(1.02, False), (0.98, False), (1.043, True), (0.957, True)])
def test_budgets_3_percent_apart_are_a_warning(used: float, is_warned: bool) -> None:
    baseline = [2.0 + 0.01 * seed for seed in range(PAIRS)]
    result = judge(baseline, [loss + 0.001 * loss**2 for loss in baseline], used=used)
    assert result.verdict == "worse"
    assert ("; the variant used" in result.sentence) == is_warned


def test_no_difference_reports_detectable_effect_and_pairs() -> None:
    result = judge(*losses(np.random.default_rng(2), 0.0), effect=0.001)
    assert result.verdict == "no difference" and result.pairs_needed > PAIRS
    assert "would be found in 80 %" in result.sentence and f"with {result.pairs_needed} pairs" in result.sentence


def test_bitwise_equal_losses_are_reported() -> None:
    result = judge([2.0] * PAIRS, [2.0] * PAIRS)
    assert result.verdict == "no difference" and "equal to the last bit" in result.sentence


def test_higher_metric_can_be_better() -> None:
    low, high = [0.5 + 0.001 * seed for seed in range(8)], [0.6 + 0.0011 * seed for seed in range(8)]
    result = judge(low, high, judged="accuracy", is_lower_better=False)
    assert result.verdict == "better" and "held-out accuracy higher by" in result.sentence
    assert judge(high, low, judged="accuracy", is_lower_better=False).verdict == "worse"


def test_difference_that_is_not_found_has_the_metrics_sign() -> None:
    metric = [0.5 + 0.001 * seed for seed in range(PAIRS)]
    variant = [value + 0.01 * (-1) ** seed + 0.002 for seed, value in enumerate(metric)]
    sentence = judge(metric, variant, judged="accuracy", is_lower_better=False).sentence
    assert sentence.startswith("no difference: mean difference of held-out accuracy 0.00200, interval -0.0")
    equal = judge(metric, metric, judged="accuracy", is_lower_better=False).sentence
    assert equal == f"no difference: held-out accuracy is equal to the last bit in all {PAIRS} pairs"
