"""Verdict of a comparison on a variant: better, worse, no difference, or undecided and why."""

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

Word = Literal["better", "worse", "no difference", "undecided"]


@dataclass(frozen=True)
class VariantVerdict:
    """Verdict on one variant against the baseline, by held-out losses, or a metric, at the end of paired runs."""

    verdict: Word
    sentence: str
    planned: int
    """Pairs that were to be run."""
    failed: int
    """Pairs of which one run or both failed."""
    alpha: float
    """Significance level of the test: 3 % shared among all variants of the comparison."""
    confidence: float
    """Confidence of the interval; its complement is 5 % shared among all variants."""
    found: PairedDifferences | None
    """None as long as no pair is there."""
    relative: float | None
    """The mean difference as a share of the baseline's mean."""
    least_pairs: int
    """That could have a verdict."""
    pairs_needed: int
    """That would see the effect that was asked about, given how much pairs differ here."""

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
    """Held-out losses, or values of a metric that is `judged`, of the seeds in order, None for a run that failed.
    `variants` is how many of them the baseline is compared with; `effect` the smallest difference worth knowing of,
    as a share of the baseline's loss; `used` how much the variant spent of what was to be equal, as a multiple of
    the baseline's; `slope` how far the variant's loss falls when its budget grows by a factor of e.

    There is a verdict only when every pair that was planned is there and there are enough of them. Better or worse is
    said where the permutation test passes and the interval leaves zero out: of equals in less than 3 % of comparisons,
    whatever the number of variants. All pairs share the budgets that pilots set, so more pairs do not reduce that
    error: |used − 1| times the slope widens the interval, and the test is against that much. Nothing is said of a
    variant that spent more and is better, or less and is worse: step times that a busy moment made wrong would pass for
    a finding.
    """
    alpha, confidence = ALPHA / variants, 1 - (1 - CONFIDENCE) / variants
    least = least_pairs(alpha)
    planned = len(baseline)
    pairs = [(first, second) for first, second in zip(baseline, variant, strict=True) if None not in (first, second)]
    failed = planned - len(pairs)
    if not pairs:
        said = f"undecided: all {planned} pairs failed"
        return VariantVerdict("undecided", said, planned, failed, alpha, confidence, None, None, least, least)
    sign = 1 if is_lower_better else -1
    differences = [sign * (second - first) for first, second in pairs]  # type: ignore[operator]
    test = paired(differences, alpha, confidence, abs((1.0 if used is None else used) - 1) * slope)
    mean = abs(sum(first for first, _ in pairs) / len(pairs))  # type: ignore[misc]
    relative = test.mean / mean if mean else None
    needed = pairs_for(max(effect * mean - test.margin, 0.0), test.spread, alpha)
    if failed:
        word, said = "undecided", f"{failed} of {planned} pairs failed, and pairs are not dropped"
    elif planned < least:
        pairs_are = "1 pair" if planned == 1 else f"{planned} pairs"
        more = for_reader(f"--seeds {least} --name NAME")
        word, said = (
            "undecided",
            f"{pairs_are} cannot pass a test at {percent(alpha)}, it takes {least}: compare again with {more}",
        )
    elif test.p <= alpha and test.low > 0:
        word, said = "worse", _told(test, relative, judged, "higher" if is_lower_better else "lower")
    elif test.p <= alpha and test.high < 0:
        word, said = "better", _told(test, relative, judged, "lower" if is_lower_better else "higher")
    else:
        word, said = "no difference", _unseen(test, mean, effect, needed)
    if word in ("better", "worse") and abs(test.mean) < effect * mean:
        asked = spelled("--min-effect", "min_effect")
        said += f"; smaller than the {100 * effect:.3g} % of {asked}, which is the least worth knowing"
    if test.margin and not failed:
        said += f"; the interval includes ± {significant(test.margin)} because budgets differed"
    direction = "worse" if test.mean > 0 else "better"
    if used is not None and word != "undecided" and direction == _explained_by(used):
        word, said = "undecided", f"{said}, but of what was to be equal it used {significant(used)} times as much"
    return VariantVerdict(word, f"{word}: {said}", planned, failed, alpha, confidence, test, relative, least, needed)


def _explained_by(used: float) -> Word | None:
    """What a variant that spent so many times the baseline's would be found to be, though it is no other."""
    return "better" if used > 1 + UNEQUAL else "worse" if used < 1 - UNEQUAL else None


def _told(test: PairedDifferences, relative: float | None, judged: str, direction: str) -> str:
    share = f" ({percent(abs(relative), 2)})" if relative is not None else ""
    low, high = sorted((abs(test.low), abs(test.high)))
    return (
        f"held-out {judged} {direction} by {significant(abs(test.mean))}{share}, interval {significant(low)} to "
        f"{significant(high)}, p = {significant(test.p, 2)}, {test.pairs} pairs"
    )


def _unseen(test: PairedDifferences, mean: float, effect: float, needed: int) -> str:
    if test.spread == 0 and test.mean == 0:
        return f"the losses of all {test.pairs} pairs are equal to the last bit"
    share = f" ({percent(test.smallest_effect / mean, 2)})" if mean else ""
    text = (
        f"mean difference {significant(test.mean)}, interval {significant(test.low)} to {significant(test.high)}, "
        f"p = {significant(test.p, 2)}, {test.pairs} pairs; "
        f"an effect of {significant(test.smallest_effect)}{share} would be found in "
        f"{percent(POWER, 0)} of such comparisons"
    )
    if test.smallest_effect > effect * mean:
        seeds = f"{needed}" if needed < MOST_PAIRS else f"{MOST_PAIRS} or more"
        text += f", one of {100 * effect:.3g} % with {seeds} pairs"
    return text
