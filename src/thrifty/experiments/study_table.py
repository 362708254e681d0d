"""Text output of a study: table of means, verdicts, and the machine of the measurement."""

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from thrifty.experiments.study_result import StudyResult
from thrifty.experiments.study_summary import OPEN, ExpectationVerdict, SeedMean

NEVER, MISSING = "never", "–"


def shown(value: float) -> str:
    """Return a value with four significant digits; "never" if it is infinite."""
    if not math.isfinite(value):
        return NEVER
    if value and not 1e-3 <= abs(value) < 1e7:
        return f"{value:.3g}"
    decimals = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def interval(estimate: SeedMean) -> str:
    """Return a mean with the half-width of its 95 % interval, such as "2.231 ± 0.012", or "never in 2 of 3"."""
    if estimate.never:
        return NEVER if estimate.never == estimate.runs else f"{NEVER} in {estimate.never} of {estimate.runs}"
    if not math.isfinite(estimate.half_width) or estimate.half_width == 0:
        return shown(estimate.mean)
    if not 1e-3 <= abs(estimate.mean) < 1e7:
        return f"{estimate.mean:.3g} ± {estimate.half_width:.2g}"
    decimals = max(0, 1 - math.floor(math.log10(estimate.half_width)))
    return f"{estimate.mean:,.{decimals}f} ± {estimate.half_width:,.{decimals}f}"


def rows(result: StudyResult) -> tuple[list[str], list[list[str]]]:
    """Return the table's header and its text rows. Columns without values are omitted."""
    summary = result.summary
    names = [name for name in result.study.quantities if any(name in numbers for numbers in summary.values())]
    body = [
        [label, *(interval(numbers[name]) if name in numbers else MISSING for name in names)]
        for label, numbers in summary.items()
    ]
    return ["case", *names], body


def sentence(verdict: ExpectationVerdict) -> str:
    """Return one expectation with its verdict and the number of seeds for which it holds."""
    if verdict.verdict == OPEN:
        return f"{OPEN}: {verdict.sentence}"
    return f"{verdict.verdict} (in {verdict.held} of {verdict.seeds} seeds): {verdict.sentence}"


def spread(result: StudyResult) -> str:
    """Return a sentence on the number of seeds and the intervals."""
    seeds = Counter(label for label, _ in result.cells).values()
    fewest, most = min(seeds, default=0), max(seeds, default=0)
    if most < 2:
        return "One seed, no intervals."
    return f"Means over {most if fewest == most else f'{fewest} or more'} seeds with 95 % intervals (Student's t)."


def measured_on(facts: Mapping[str, Any]) -> str:
    """Return a sentence on the machine, the versions and the command."""
    command = shlex.join(map(str, facts.get("command", [])))
    return f"Measured on {facts['cpu']}, torch {facts['torch']}, Python {facts['python']}, by `{command}`."


def table(result: StudyResult) -> str:
    """Return the study result as Markdown."""
    study, (head, body) = result.study, rows(result)
    lines = [f"# {study.name}", "", study.about, "", *_markdown(head, body), ""]
    lines += [spread(result), ""]
    lines += [f"- `{name}`: {quantity.about}" for name, quantity in study.quantities.items() if name in head]
    if result.verdicts:
        lines += ["", "Expected:", "", *(f"- {sentence(verdict)}" for verdict in result.verdicts)]
    return "\n".join([*lines, "", measured_on(result.environment), ""])


def _markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *body]) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        others = [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        return "| " + " | ".join([row[0].ljust(widths[0]), *others]) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [line(head), line(rule), *map(line, body)]
