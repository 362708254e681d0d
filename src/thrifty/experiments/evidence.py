"""Evidence for techniques: findings of benchmarks, comparisons and studies in results/ and runs/."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from thrifty.experiments.findings import TOLERANCE, Finding, read_findings
from thrifty.experiments.past_results import (
    FOLDERS,
    PastComparison,
    PastStudy,
    past_comparisons,
    past_studies,
    shown_path,
)

ASPECTS = ("time", "memory", "data", "quality", "exactness")
_OF_EQUAL = {"time": "time", "flops": "time", "tokens": "data", "steps": "data"}
"""Aspect that a comparison measures, keyed by the budget that is equal for its variants."""


@dataclass(frozen=True)
class Evidence:
    """All measurements of one technique in benchmarks, comparisons and studies."""

    findings: tuple[Finding, ...] = ()
    comparisons: tuple[PastComparison, ...] = ()
    studies: tuple[PastStudy, ...] = ()

    def in_words(self) -> list[str]:
        """Return one line for each finding, comparison and study."""
        return [each.in_words() for each in (*self.findings, *self.comparisons, *self.studies)]

    def sources(self) -> list[tuple[str, str]]:
        """Return one line for each finding, comparison and study, and its source: a file, or a command that repeats the
        measurement.
        """
        lines = [(each.in_words(), each.source) for each in self.findings]
        lines += [(each.in_words(), shown_path(each.file)) for each in (*self.comparisons, *self.studies)]
        return [(line.removesuffix(f": {source}"), source) for line, source in lines]

    def best(self) -> str:
        """Return the line with the strongest evidence; empty without evidence. The order is: the longest comparison in
        which only this technique changed, other comparisons, studies, findings.
        """
        comparisons = sorted(self.comparisons, key=lambda one: (one.alone, one.tokens), reverse=True)
        return next((each.in_words() for each in (*comparisons, *self.studies, *self.findings)), "")

    def verdicts(self) -> dict[str, str]:
        """Return a verdict for each measured aspect. The verdict is "better", "equal", "worse" or "undecided" if all
        evidence agrees, and "mixed" otherwise.
        """
        words: dict[str, set[str]] = defaultdict(set)
        for aspect, verdict in self._verdicts():
            words[aspect].add(verdict)
        return {
            aspect: words[aspect].pop() if len(words[aspect]) == 1 else "mixed" for aspect in ASPECTS if words[aspect]
        }

    def _verdicts(self) -> Iterator[tuple[str, str]]:
        for finding in self.findings:
            yield finding.aspect, finding.verdict
        for comparison in self.comparisons:
            is_clear = comparison.has_learned and (comparison.alone or comparison.is_replacement)
            if comparison.role == "added" and is_clear:
                yield _OF_EQUAL[comparison.equal], comparison.verdict
                if ratio := comparison.peak_memory:
                    yield "memory", "equal" if abs(ratio - 1) <= TOLERANCE else "better" if ratio < 1 else "worse"

    def machines(self) -> list[str]:
        """Return the machines on which the evidence was measured."""
        devices = [finding.device for finding in self.findings]
        return list(dict.fromkeys([*devices, *(each.cpu for each in (*self.comparisons, *self.studies))]))


def evidence_by_technique(folders: Sequence[Path] = FOLDERS) -> dict[str, Evidence]:
    """Return the evidence in `folders`, keyed by technique."""
    findings, comparisons, studies = read_findings(folders), past_comparisons(folders), past_studies(folders)
    names = {each.technique for each in (*findings, *comparisons)}.union(*(each.techniques for each in studies))
    return {
        name: Evidence(
            tuple(each for each in findings if each.technique == name),
            tuple(each for each in comparisons if each.technique == name),
            tuple(each for each in studies if name in each.techniques),
        )
        for name in sorted(names)
    }
