"""Verdict on a variant: better, worse, no difference, or undecided with the reason."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from thrifty.comparing.paired_statistics import (
    ALPHA,
    CONFIDENCE,
    MOST_PAIRS,
    POWER,
    PairedDifferences,
    least_pairs,
    paired,
    pairs_for,
)
from thrifty.core.errors import for_reader, spelled
from thrifty.reporting.comparison_page import UNEQUAL
from thrifty.reporting.number_format import percent, significant

EXPLAINING = 0.05
"""Relative deviation from the equal budget above which the deviation may explain a difference."""
Word = Literal["better", "worse", "no difference", "undecided"]


@dataclass(frozen=True)
class VariantVerdict:
    """Verdict on one variant relative to the baseline, from final held-out losses or another metric of paired runs."""

    verdict: Word
    sentence: str
    planned: int
    """Planned number of pairs."""
    failed: int
    """Number of pairs in which at least one run failed."""
    alpha: float
    """Significance level of the test: 3 % divided by the number of variants of the comparison."""
    confidence: float
    """Confidence of the interval: 1 minus 5 % divided by the number of variants of the comparison."""
    found: PairedDifferences | None
    """Statistics of the pairs; None if there is no pair."""
    relative: float | None
    """Mean difference relative to the baseline's mean."""
    least_pairs: int
    """Minimum number of pairs for a verdict."""
    pairs_needed: int
    """Number of pairs that would detect the requested effect at the measured spread."""

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


def judge(
    baseline: Sequence[float | None],
    variant: Sequence[float | None],
    *,
    variants: int = 1,
    effect: float = 0.01,
    used: float | None = 1.0,
    slope: float = 0.0,
    judged: str = "loss",
    is_lower_better: bool = True,
) -> VariantVerdict:
    """Return the verdict on a variant.

    `baseline` and `variant` have one value per seed: the held-out loss, or the metric `judged`; None for a failed run.
    `variants` is the number of variants of the comparison. `effect` is the smallest relevant difference, relative to
    the baseline's loss. `used` is the variant's spent budget divided by the baseline's; None if unknown. `slope` is the
    decrease of the variant's loss when its budget grows by a factor of e.

    A verdict requires that all planned pairs finished, and that there are enough pairs. "better" or "worse" requires
    that the permutation test passes and the interval excludes zero. If all variants equal the baseline, "better" or
    "worse" occurs in less than 3 % of comparisons, for any number of variants.

    One plan sets the budgets of all pairs, so more pairs do not reduce the effect of wrong budgets. The interval is
    therefore widened by |used − 1| times the slope. The null hypothesis of the test is a mean difference of at most
    this amount. The verdict is "undecided" if a variant spent more and is better, or spent less and is worse. Wrong
    step times of a busy machine could explain such a difference.
    """
    alpha, confidence = ALPHA / variants, 1 - (1 - CONFIDENCE) / variants
    least = least_pairs(alpha)
    planned = len(baseline)
    pairs = [(first, second) for first, second in zip(baseline, variant, strict=True) if None not in (first, second)]
    failed = planned - len(pairs)
    if not pairs:
        text = f"undecided: all {planned} pairs failed"
        return VariantVerdict("undecided", text, planned, failed, alpha, confidence, None, None, least, least)
    sign = 1 if is_lower_better else -1
    differences = [sign * (second - first) for first, second in pairs]  # type: ignore[operator]
    test = paired(differences, alpha, confidence, abs((1.0 if used is None else used) - 1) * slope)
    mean = abs(sum(first for first, _ in pairs) / len(pairs))  # type: ignore[misc]
    relative = test.mean / mean if mean else None
    needed = pairs_for(max(effect * mean - test.margin, 0.0), test.spread, alpha)
    if failed:
        word, text = "undecided", f"{failed} of {planned} pairs failed, but a verdict requires all pairs"
    elif planned < least:
        pairs_are = "1 pair" if planned == 1 else f"{planned} pairs"
        more = for_reader(f"--seeds {least} --name NAME")
        word, text = (
            "undecided",
            f"{pairs_are} cannot pass a test at {percent(alpha)}; it requires {least} pairs: compare again with {more}",
        )
    elif test.p <= alpha and test.low > 0:
        word, text = "worse", _finding(test, relative, judged, "higher" if is_lower_better else "lower")
    elif test.p <= alpha and test.high < 0:
        word, text = "better", _finding(test, relative, judged, "lower" if is_lower_better else "higher")
    else:
        word, text = "no difference", _no_finding(test, mean, effect, needed, judged, is_lower_better)
    if word in ("better", "worse") and abs(test.mean) < effect * mean:
        option = spelled("--min-effect", "min_effect")
        text += f"; smaller than {100 * effect:.3g} % ({option}), the smallest relevant effect"
    if test.margin and not failed:
        text += f"; the interval includes ± {significant(test.margin)} because budgets differed"
    direction = "worse" if test.mean > 0 else "better"
    if used is not None and word != "undecided" and abs(used - 1) > UNEQUAL:
        is_explained = direction == _explained_by(used)
        word = "undecided" if is_explained else word
        text += (
            f"{', but' if is_explained else ';'} the variant used {significant(used)} times the budget of the baseline"
        )
    return VariantVerdict(word, f"{word}: {text}", planned, failed, alpha, confidence, test, relative, least, needed)


def _explained_by(used: float) -> Word | None:
    """Return the verdict that an unequal budget alone would cause; None if budgets are nearly equal."""
    return "better" if used > 1 + EXPLAINING else "worse" if used < 1 - EXPLAINING else None


def _finding(test: PairedDifferences, relative: float | None, judged: str, direction: str) -> str:
    percentage = f" ({percent(abs(relative), 2)})" if relative is not None else ""
    low, high = sorted((abs(test.low), abs(test.high)))
    return (
        f"held-out {judged} {direction} by {significant(abs(test.mean))}{percentage}, interval {significant(low)} to "
        f"{significant(high)}, p = {significant(test.p, 2)}, {test.pairs} pairs"
    )


def _no_finding(
    test: PairedDifferences, mean: float, effect: float, needed: int, judged: str, is_lower_better: bool
) -> str:
    if test.spread == 0 and test.mean == 0:
        return f"held-out {judged} is equal to the last bit in all {test.pairs} pairs"
    signed = (test.mean, test.low, test.high) if is_lower_better else (-test.mean, -test.high, -test.low)
    difference, low, high = map(significant, signed)
    percentage = f" ({percent(test.smallest_effect / mean, 2)})" if mean else ""
    text = (
        f"mean difference of held-out {judged} {difference}, interval {low} to {high}, "
        f"p = {significant(test.p, 2)}, {test.pairs} pairs; "
        f"an effect of {significant(test.smallest_effect)}{percentage} would be found in "
        f"{percent(POWER, 0)} of such comparisons"
    )
    if test.smallest_effect > effect * mean:
        seeds = f"{needed}" if needed < MOST_PAIRS else f"{MOST_PAIRS} or more"
        text += f", an effect of {100 * effect:.3g} % with {seeds} pairs"
    return text
