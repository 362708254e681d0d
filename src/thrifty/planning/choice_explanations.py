"""Reasons for or against each technique of the catalog in a plan."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from thrifty.composition.compose import compose
from thrifty.composition.explain import touched_modules
from thrifty.core.claims import PARALLELISM
from thrifty.core.errors import ThriftyError, reason_of
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.planning.cost_estimates import COUNTED_HIGH, largest_part
from thrifty.planning.plan_candidate import PlanCandidate
from thrifty.planning.plan_search import PlanSearch
from thrifty.planning.proven_gains import AXIS as GAINS
from thrifty.planning.proven_gains import ProvenGain
from thrifty.planning.rank_options import RANKS
from thrifty.planning.search_space import NUMERICS_ORDER, Catalogue, PlanOption

LITTLE = 0.02
"""Minimum saved fraction of the tensors at the peak that counts as a gain."""
DETAIL = {
    "activations": "activation memory",
    "optimizer": "optimizer state",
    "temporary": "memory of single operations",
    "parameters": "weights",
    "gradients": "gradients",
}


@dataclass(frozen=True)
class ChoiceReason:
    technique: str
    verdict: str
    """"kept", "added", "changed", "taken out" or "not taken"."""
    why: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def verdict_on(name: str, before: Iterable[Technique], after: Iterable[Technique]) -> str:
    """Return how a technique differs between recipe and plan: added, kept, changed, taken out or not taken."""
    own, planned = (next((each for each in group if each.name == name), None) for group in (before, after))
    if planned is None:
        return "not taken" if own is None else "taken out"
    return "added" if own is None else "kept" if own == planned else "changed"


@dataclass(frozen=True)
class ChoiceExplainer:
    search: PlanSearch
    chosen: PlanCandidate
    disallowed: Mapping[str, Sequence[PlanOption]]
    """Options that the request does not allow, by axis of the search space."""
    catalogue: Catalogue
    missing: Mapping[str, str]
    allow: Numerics
    evidence: Mapping[str, str]
    """Paths of measured results, by technique name."""
    gains: Sequence[ProvenGain] = ()

    def all(self) -> list[ChoiceReason]:
        return [self.of(name) for name in sorted(self.catalogue)]

    def of(self, name: str) -> ChoiceReason:
        verdict = verdict_on(name, self.search.base, self.chosen.techniques)
        if verdict == "not taken":
            measured = self.evidence.get(name)
            return ChoiceReason(name, verdict, self._not_taken(name) + (f"; measured: {measured}" if measured else ""))
        if verdict == "kept":
            return ChoiceReason(name, verdict, self._kept(name))
        option = self._chosen_with(name)
        proven = next((gain for gain in self.gains if gain.option == option), None)
        if proven is None:
            return ChoiceReason(name, verdict, self._effect(option))
        gain = (
            f"equal loss after {option.relative_steps:.0%} of the steps, in {proven.time:.0%} of the time, in "
            f"{proven.pairs} paired runs"
        )
        why = f"{gain}; {self._effect(option)}; proven: {self.evidence.get(name, 'by a comparison')}"
        return ChoiceReason(name, verdict, why)

    def _chosen_with(self, name: str) -> PlanOption:
        """Return the chosen option that adds or removes a technique."""
        return next(w for w in self.chosen.options if name in w.drops or name in {t.name for t in w.techniques})

    def _options_with(self, name: str, axes: Mapping[str, Sequence[PlanOption]]) -> list[PlanOption]:
        every = (option for options in axes.values() for option in options)
        return [option for option in every if name in (technique.name for technique in option.techniques)]

    def _kept(self, name: str) -> str:
        without = [option for option in self.search.singles if name in option.drops and not option.techniques]
        run = [c for c in self.search.tried if c.timing and len(c.options) == 1 and c.options[0] in without]
        if run:
            return f"your recipe has it; without it {self._against_base(run[0])}"
        return "your recipe has it"

    def _effect(self, option: PlanOption) -> str:
        """Return the effect of an option on the tensors at the peak, and on the measured time of a step."""
        alone = self.search.alone(option)
        saved = 1 - alone.memory / self.search.plainest.memory
        effects = []
        if abs(saved) >= LITTLE:
            effects.append(
                f"alone it {'reduces' if saved > 0 else 'raises'} the tensors at the peak by {abs(saved):.0%}"
            )
        if ratio := self._step_ratio(option):
            effects.append(f"a step takes {ratio:.2f} times the time without it")
        elif self.chosen.timing and any(not candidate.options for candidate in self.search.tried):
            effects.append(f"with all changes {self._against_base(self.chosen)}")
        return "; ".join(effects) or "part of the fastest combination that fits"

    def _step_ratio(self, option: PlanOption) -> float | None:
        """Return the measured step time with an option relative to that without it; None if no two probes differ by
        this option only. Probes of the plan come first."""
        timed = {frozenset(each.options): each.least_step for each in self.search.tried if each.timing}
        chosen = frozenset(self.chosen.options)
        for options in sorted(timed, key=lambda options: options != chosen):
            if option in options and options - {option} in timed:
                return timed[options] / timed[options - {option}]
        return None

    def _against_base(self, candidate: PlanCandidate) -> str:
        base = next((c for c in self.search.tried if not c.options and c.timing), None)
        if base is None or candidate.timing is None:
            return "it fits, unlike the unchanged recipe" if base is None else "nothing was measured"
        ratio = candidate.least_step / base.least_step
        return f"a step takes {ratio:.2f} times the measured time of the unchanged recipe"

    def _not_taken(self, name: str) -> str:
        kind, options = self.catalogue[name], self._options_with(name, self.search.options)
        if name in self.missing:
            return self.missing[name]
        if options:
            return self._offered(options)
        if disallowed := self._options_with(name, self.disallowed):
            return self._disallowed(disallowed[0].numerics)
        if kind.claims & PARALLELISM:
            return self._undivided()
        try:
            technique = kind()
        except ThriftyError as error:
            return f"requires your settings: {error.what}"
        if NUMERICS_ORDER.index(technique.numerics) > NUMERICS_ORDER.index(self.allow):
            return self._disallowed(technique.numerics)
        if refusal := self._refusal(technique):
            return f"refused: {refusal}"
        if technique.numerics is Numerics.DIFFERENT:
            return "a different algorithm: only a comparison shows if the model learns more (thrifty compare)"
        if technique.stage is Stage.MEASURE:
            return "it measures training, but changes nothing"
        return "nothing in this run requires it"

    def _undivided(self) -> str:
        if RANKS in self.search.options:
            return f"no mesh of these ranks fits the technique and a batch of {self.search.plain.source.batch}"
        return "the plan has one rank, so no work can be divided (--ranks N plans for several)"

    def _disallowed(self, numerics: Numerics) -> str:
        change = "rounds differently" if numerics is Numerics.ROUNDING else "changes the result"
        return f"{change}; the plan allows only {self.allow.value} changes"

    def _refusal(self, technique: Technique) -> str:
        others = [each for each in self.search.base if each.name != technique.name]
        try:
            run = compose(self.search.plain, [*others, technique], self.search.steps, self.search.device)
            if technique.overrides("batches"):
                run.source.at(0)
            touched_modules(run)
        except Exception as refusal:  # a bug in one option must not stop planning
            return reason_of(refusal)
        return ""

    def _offered(self, options: Sequence[PlanOption]) -> str:
        """Return the reason against a considered technique: refused, not faster, or memory savings too small."""
        counted = [option for option in options if option in self.search.singles]
        if not counted:
            why = self.search.refused[options[0]]
            return why if why.startswith("not counted") else f"refused: {why}"
        if any(option.is_for_speed for option in counted):
            return self._no_faster(counted)
        return self._not_needed(counted)

    def _not_needed(self, counted: Sequence[PlanOption]) -> str:
        """Return the reason against a technique that saves memory but takes time."""
        base = self.search.plainest
        least = min(self.search.singles[option].memory for option in counted)
        saved = 1 - least / base.memory
        if saved < LITTLE:
            name, share = largest_part(base)
            return f"no gain: it saves {saved:.1%} of the tensors; {DETAIL.get(name, name)} is {share:.0%} of them"
        if any(not candidate.options for candidate in self.search.tried):
            return f"not needed: the run fits without it; it would save {saved:.0%} of the tensors but take time"
        measured = self._measured(counted)
        alone = f"alone it saves {saved:.0%} of the tensors"
        if least * COUNTED_HIGH > self.search.memory:
            alone += f", to {least / 1e6:,.0f} MB, which is not enough"
        return f"other options suffice, and {measured or 'are expected to take less time'}; {alone}"

    def _no_faster(self, options: Sequence[PlanOption]) -> str:
        is_proven = options[0].axis == GAINS
        other = next((option for option in self.chosen.options if option.axis == GAINS), None)
        if is_proven and other:
            return f"its gain is proven alone, but not together with {other.label}"
        if measured := self._measured(options):
            why = "its steps are too slow here for its proven gain" if is_proven else "no measured gain"
            return f"{why}: {measured}"
        failed = [why for tried, why in self.search.misfits.items() if {*tried} & {*options}]
        if failed:
            return failed[0]
        run = any({*candidate.options} & {*options} for candidate in self.search.tried)
        others = "fewer changes are expected to be equally fast" if run else "other options were expected to be faster"
        return f"not run: {others}"

    def _measured(self, options: Sequence[PlanOption]) -> str:
        """Return the time of the best probe with any of `options`, relative to the plan, as text. Return "" if no such
        probe ran. It is the time of a step, or if the plan or the probe has a proven gain, the time to equal loss.
        """
        timed = [candidate for candidate in self.search.tried if {*candidate.options} & {*options} and candidate.timing]
        if not timed or not self.chosen.timing:
            return ""
        best = min(timed, key=self.search.seconds)
        ratio = self.search.seconds(best) / self.search.seconds(self.chosen)
        if best.relative_steps != self.chosen.relative_steps:
            return f"equal loss with {best.label} takes {ratio:.2f} times the plan's time"
        return f"a step with {best.label} takes {ratio:.2f} times the plan's time"
