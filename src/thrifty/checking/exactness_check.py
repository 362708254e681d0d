"""Check that techniques keep their promise of unchanged values.

The check selects each technique that promises the plain run's values, bit for bit or within rounding. The check adds
the technique alone to a run, and compares the results with the same run without the technique. Finally, the check adds
all selected techniques together.
"""

from collections.abc import Iterator, Sequence

from thrifty.checking.check_verdicts import PromiseVerdict, broken, holds, not_applicable
from thrifty.checking.observed_runs import (
    DRAWING,
    RANDOM,
    CheckSubject,
    StepObservations,
    is_equal,
    is_same,
    one_line_error,
    reference_run,
    train_observed,
)
from thrifty.checking.rounding import IN_16_BITS, compare_rounding, loss_sensitivity
from thrifty.core.batch_norms import effective_numerics
from thrifty.core.errors import UsageError
from thrifty.core.technique import Numerics, Technique


def exactness(subject: CheckSubject, whole: StepObservations) -> Iterator[PromiseVerdict]:
    """Yield a verdict for each technique that promises unchanged values, and one for all of these techniques together.
    `whole` is the observed run with all techniques, which is reused.
    """
    norms = subject.batch_norms
    promising = [one for one in subject.alone if effective_numerics(one, norms) is not Numerics.DIFFERENT]
    if not promising:
        yield not_applicable("values", "techniques", "no technique promises the plain run's values")
        return
    references = _References(subject, whole)
    for one in promising:
        yield references.verdict([one])
    if len(promising) > 1:
        yield references.verdict(promising)


class _References:
    """Runs to compare with, each trained only once."""

    def __init__(self, subject: CheckSubject, whole: StepObservations):
        self.subject, self.whole = subject, whole
        norms = subject.batch_norms
        different = [one for one in subject.alone if effective_numerics(one, norms) is Numerics.DIFFERENT]
        self.settled = [one for one in different if one.stage not in DRAWING]
        self.rounded = [one for one in self.settled if not _enlarges(one)]
        self.known: dict[tuple[str, ...], tuple[StepObservations, bool]] = {}

    def verdict(self, chosen: Sequence[Technique]) -> PromiseVerdict:
        about = chosen[0].name if len(chosen) == 1 else "all of these together"
        exact = all(one.numerics is Numerics.EXACT for one in chosen)
        # alone: only base techniques that do not amplify rounding; together: all base techniques of the recipe
        base = self.settled if exact or len(chosen) > 1 else self.rounded
        promise, quiet = "exact" if exact else "rounding", False
        try:
            reference, is_random = self.reference(base)
            quiet = is_random and not exact
            if quiet:
                reference, is_random = self.reference(base, quiet=True)
                if is_random:
                    return not_applicable(promise, about, RANDOM)
            observations = self.trained([*base, *chosen], quiet)
        except UsageError as refused:
            return not_applicable(promise, about, f"it cannot run alone: {refused.what}")
        except Exception as error:  # any technique may raise anything
            if quiet:  # the recipe itself trains with dropout
                return not_applicable(promise, about, f"it cannot be measured without dropout: {one_line_error(error)}")
            return broken(
                promise, about, f"the run fails with this technique: {one_line_error(error)}", _without(chosen)
            )
        if exact:
            return _bitwise(about, observations, reference, chosen)
        low = len(chosen) > 1 and any(one.is_low_precision for one in base)
        tolerance = sum(one.tolerance for one in chosen)
        tolerance = max(tolerance, IN_16_BITS) if low else tolerance
        compared = compare_rounding(
            observations.losses,
            observations.first,
            reference,
            tolerance,
            lambda: loss_sensitivity(self.subject, base, reference, quiet),
        )
        if compared.within:
            return holds("rounding", about, compared.text)
        place = f"; the gradient of {compared.whose}" if not compared.gradient_within else ""
        return broken("rounding", about, compared.text + place, _without(chosen))

    def trained(self, techniques: Sequence[Technique], quiet: bool) -> StepObservations:
        if not quiet and {one.name for one in techniques} == {one.name for one in self.subject.alone}:
            return self.whole
        return train_observed(self.subject, techniques, quiet=quiet)[1]

    def reference(self, base: Sequence[Technique], quiet: bool = False) -> tuple[StepObservations, bool]:
        """Return the `reference_run` of techniques."""
        key = (*(one.name for one in base), str(quiet))
        if key not in self.known:
            self.known[key] = reference_run(self.subject, base, quiet)
        return self.known[key]


def _enlarges(one: Technique) -> bool:
    """Return True if a technique amplifies last-bit differences, through low precision or through a decision."""
    return one.is_low_precision or one.overrides("changes", "batches") or one.stage.label == "attention"


def _bitwise(
    about: str, actual: StepObservations, wanted: StepObservations, chosen: Sequence[Technique]
) -> PromiseVerdict:
    promised = "promised: equal to the run without it, bit for bit"
    pairs = zip(
        zip(actual.losses, actual.norms, strict=True), zip(wanted.losses, wanted.norms, strict=True), strict=True
    )
    for step, (mine, theirs) in enumerate(pairs, start=1):
        for quantity, one, other in zip(("loss", "gradient norm"), mine, theirs, strict=True):
            if not is_same(one, other):
                measured = f"{promised}; the {quantity} of step {step} is {one:.9g}, not {other:.9g}"
                return broken("exact", about, measured, _without(chosen))
    now, then = actual.tensors(), wanted.tensors()
    for name, tensor in then.items():
        if name not in now or not is_equal(now[name], tensor):
            measured = f"{promised}; after {len(actual.losses)} steps {name} differs"
            return broken("exact", about, measured, _without(chosen))
    steps = len(actual.losses)
    return holds("exact", about, f"losses, gradient norms and {len(then)} tensors of {steps} steps, bit for bit")


def _without(chosen: Sequence[Technique]) -> str:
    return " ".join(f"--without {one.name}" for one in chosen)
