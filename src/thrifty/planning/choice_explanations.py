"""Why each technique of the catalogue is in a plan, or is not."""

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
from thrifty.planning.rank_options import RANKS
from thrifty.planning.search_space import NUMERICS_ORDER, Catalogue, PlanOption

LITTLE = 0.02
"""A share of the peak, or of a step's time, below which nothing is gained."""
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
    """Return the verdict on a technique from recipe to plan: added, kept, changed, taken out or not taken."""
    own, planned = (next((each for each in some if each.name == name), None) for some in (before, after))
    if planned is None:
        return "not taken" if own is None else "taken out"
    return "added" if own is None else "kept" if own == planned else "changed"


@dataclass(frozen=True)
class ChoiceExplainer:
    search: PlanSearch
    chosen: PlanCandidate
    barred: Mapping[str, Sequence[PlanOption]]
    """Ways of each axis that what was asked for does not allow."""
    catalogue: Catalogue
    lacking: Mapping[str, str]
    allow: Numerics
    evidence: Mapping[str, str]
    """Where something was measured of a technique, by its name."""

    def all(self) -> list[ChoiceReason]:
        return [self.of(name) for name in sorted(self.catalogue)]

    def of(self, name: str) -> ChoiceReason:
        verdict = verdict_on(name, self.search.base, self.chosen.techniques)
        if verdict == "not taken":
            measured = self.evidence.get(name)
            return ChoiceReason(name, verdict, self._not_taken(name) + (f"; measured: {measured}" if measured else ""))
        return ChoiceReason(name, verdict, self._kept(name) if verdict == "kept" else self._effect(name))

    def _ways(self, name: str, among: Mapping[str, Sequence[PlanOption]]) -> list[PlanOption]:
        """The ways that take this technique in."""
        some = (way for ways in among.values() for way in ways)
        return [way for way in some if name in (technique.name for technique in way.techniques)]

    def _kept(self, name: str) -> str:
        without = [way for way in self.search.singles if name in way.drops and not way.techniques]
        run = [c for c in self.search.tried if c.timing and len(c.ways) == 1 and c.ways[0] in without]
        if run:
            return f"your recipe has it; without it {self._against_base(run[0])}"
        return "your recipe has it"

    def _effect(self, name: str) -> str:
        """What the way that brought it in, or out, does by itself and in the plan."""
        way = next(w for w in self.chosen.ways if name in w.drops or name in {t.name for t in w.techniques})
        alone = self.search.alone(way)
        saved = 1 - alone.memory / self.search.plainest.memory
        said = (
            [f"{abs(saved):.0%} {'less' if saved > 0 else 'more'} at the peak by itself"]
            if abs(saved) >= LITTLE
            else []
        )
        if self.chosen.timing and any(not candidate.ways for candidate in self.search.tried):
            said.append(f"with all changes {self._against_base(self.chosen)}")
        return "; ".join(said) or "part of the fastest combination that fits"

    def _against_base(self, candidate: PlanCandidate) -> str:
        base = next((c for c in self.search.tried if not c.ways and c.timing), None)
        if base is None or candidate.timing is None:
            return "it fits, which the recipe as it is does not" if base is None else "nothing was measured"
        ratio = candidate.least_step / base.least_step
        return f"a step takes {ratio:.2f} of the time measured for the recipe as it is"

    def _not_taken(self, name: str) -> str:
        kind, ways = self.catalogue[name], self._ways(name, self.search.ways)
        if name in self.lacking:
            return self.lacking[name]
        if ways:
            return self._offered(ways)
        if barred := self._ways(name, self.barred):
            return self._barred(barred[0].numerics)
        if kind.claims & PARALLELISM:
            return self._undivided()
        try:
            technique = kind()
        except ThriftyError as error:
            return f"needs settings of your own: {error.what}"
        if NUMERICS_ORDER.index(technique.numerics) > NUMERICS_ORDER.index(self.allow):
            return self._barred(technique.numerics)
        if refusal := self._refusal(technique):
            return f"refused: {refusal}"
        if technique.numerics is Numerics.DIFFERENT:
            return "another algorithm: whether it learns more within this budget only a race can say (thrifty compare)"
        if technique.stage is Stage.MEASURE:
            return "it measures, and saves nothing"
        return "nothing of this run asks for it"

    def _undivided(self) -> str:
        if RANKS in self.search.ways:
            return f"no mesh of these ranks suits it and a batch of {self.search.plain.source.batch}"
        return "one rank: there is nothing to divide the work among (--ranks looks at several)"

    def _barred(self, numerics: Numerics) -> str:
        what = "rounds otherwise" if numerics is Numerics.ROUNDING else "changes the result"
        return f"{what}, and you asked for {self.allow.value}"

    def _refusal(self, technique: Technique) -> str:
        others = [each for each in self.search.base if each.name != technique.name]
        try:
            run = compose(self.search.plain, [*others, technique], self.search.steps, self.search.device)
            if technique.overrides("batches"):
                run.source.at(0)
            touched_modules(run)
        except Exception as refusal:  # a bug of one option is no reason to end the plan
            return reason_of(refusal)
        return ""

    def _offered(self, ways: Sequence[PlanOption]) -> str:
        """Of a technique that was looked at: refused, slower as measured, too little, or only a cost here."""
        counted = [way for way in ways if way in self.search.singles]
        if not counted:
            why = self.search.refused[ways[0]]
            return why if why.startswith("not counted") else f"refused: {why}"
        if any(way.is_for_speed for way in counted):
            return self._no_faster(counted)
        return self._not_needed(counted)

    def _not_needed(self, counted: Sequence[PlanOption]) -> str:
        """Of one that saves memory and costs time."""
        base = self.search.plainest
        least = min(self.search.singles[way].memory for way in counted)
        saved = 1 - least / base.memory
        if saved < LITTLE:
            name, share = largest_part(base)
            return f"no gain here: it takes {saved:.1%} off the peak, of which {DETAIL.get(name, name)} is {share:.0%}"
        if any(not candidate.ways for candidate in self.search.tried):
            return f"not needed: everything fits without it; it would take {saved:.0%} off the peak and cost time"
        measured = self._measured(counted)
        alone = f"by itself it takes {saved:.0%} off the peak"
        if least * COUNTED_HIGH > self.search.memory:
            alone += f", to {least / 1e6:,.0f} MB, which is not enough"
        return f"others are enough, and {measured or 'are expected to cost less time'}; {alone}"

    def _no_faster(self, ways: Sequence[PlanOption]) -> str:
        if measured := self._measured(ways):
            return f"measured no gain: {measured}"
        failed = [why for tried, why in self.search.misfits.items() if {*tried} & {*ways}]
        if failed:
            return failed[0]
        run = any({*candidate.ways} & {*ways} for candidate in self.search.tried)
        return "not run: " + ("changing less is expected to be as fast" if run else "others were expected to be faster")

    def _measured(self, ways: Sequence[PlanOption]) -> str:
        """How the fastest of what was run with one of these compares with the plan; "" where none was."""
        timed = [candidate for candidate in self.search.tried if {*candidate.ways} & {*ways} and candidate.timing]
        if not timed or not self.chosen.timing:
            return ""
        fastest = min(timed, key=lambda candidate: candidate.least_step)
        ratio = fastest.least_step / self.chosen.least_step
        return f"a step with {fastest.label} takes {ratio:.2f} of the plan's time"
