"""Search for a plan. Footprints of single options are counted, and footprints of combinations are estimated. The
footprints of the best combinations are counted, and the fastest of these combinations are probed: their steps run in a
separate process.

Estimates only determine the order of the search. The counted footprint of a proposed candidate fits. If probes are
allowed, a probe of the candidate also stayed within the requested memory."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, inf

from thrifty.composition.compose import refuse_illegal
from thrifty.core.errors import InfeasibleError, ThriftyError
from thrifty.core.technique import Numerics
from thrifty.planning.candidate_trials import NEAR, CandidateTrials
from thrifty.planning.plan_candidate import PlanCandidate
from thrifty.planning.proven_gains import AXIS as GAINS
from thrifty.planning.proven_gains import ProvenGain, options_with_gains
from thrifty.planning.search_space import NUMERICS_ORDER

FINALISTS, COUNTS, PROBES, ALIKE = 4, 48, 8, 2
"""Number of probed candidates that fit, in addition to the unchanged recipe. Maximum numbers of combinations whose
footprint is counted, of probes, and of candidates that differ only in micro-batches."""
TOO_HIGH = 1.25
"""Maximum factor by which the estimated memory of a combination is expected to exceed its counted memory."""
NO_DIFFERENCE = 0.03
"""Minimum fraction by which a candidate must be faster than a candidate with fewer changes."""
COUNTING = 0.5
"""Fraction of the planning time in which footprints of options are counted. The rest is for probes."""

NO_ROOM = "does not fit the disk"


@dataclass
class PlanSearch(CandidateTrials):
    """Search for the candidate that fits and is expected to reach an equal loss first.

    Candidates differ in the time of their steps. Only those with a proven gain also differ in the number of steps.
    """

    finalists: int = FINALISTS
    gains: Sequence[ProvenGain] = ()
    """Techniques that change the result of training, with a gain that comparisons proved."""
    wider: Collection[Numerics] = ()
    """Changes of values that are not allowed, and that other options would make."""

    def run(self) -> PlanCandidate:
        """Return the best candidate. Raises InfeasibleError if no candidate fits; the error names the limit to relax.

        If the time limit comes before the first probe has a result, candidates are counted, but not probed. Before the
        error is raised, the candidate with the least memory is tried.
        """
        self.say(f"the unchanged recipe: {self.plainest.memory / 1e6:,.0f} MB counted")
        self._try_recipe()
        self._refuse_less_than_a_process()
        self.options = {**self.options, **options_with_gains(self.gains, self.plainest.parameters)}
        self.measured = {gain.option: gain.step_time for gain in self.gains}
        self.look_at_singles()
        self._time_gains()
        self.counts = 0
        for candidate in self._promising():
            if self._has_enough() or self._is_late():
                break
            if not (self._is_too_slow(candidate) or self._is_hopeless(candidate)):
                self.try_out(candidate)
        if not self.tried:
            self._try_leanest()
        return self.best()

    def fits(self) -> bool:
        return bool(self.tried)

    def is_counting_late(self) -> bool:
        has_each_axis = len(self.singles) + len(self.refused) >= len(self.options)
        for_probes = (1 - COUNTING) * self.allowance(self.fastest) if self.time else 0.0
        if not has_each_axis or self.seconds_left >= for_probes:
            return False
        self.stopped = self.stopped or "some options"
        return True

    def _is_late(self) -> bool:
        """Return True if no time is left for another probe.

        If the unchanged recipe does not fit, the next probe always runs, because a plan needs a candidate that fits.
        """
        has_begun = self.tried or self.probes > 1 or self.counts >= FINALISTS
        if not has_begun or self.seconds_left > (self.longest_probe if self.time else 0.0):
            return False
        self.stopped = self.stopped or "some combinations"
        return True

    def _expected(self, candidate: PlanCandidate) -> float:
        """Return the expected bytes of a candidate's process, from the estimated footprint."""
        return self.processes.expected(candidate, self.estimated(candidate.options))

    def _expected_least(self, candidate: PlanCandidate) -> float:
        return self.processes.expected_least(candidate, self.estimated(candidate.options))

    def _is_hopeless(self, candidate: PlanCandidate) -> bool:
        """Return True if half of the allowed probes had the candidate's kind of process, and none of them fits."""
        kind = candidate.process_kind
        return len(self.processes.surpluses[kind]) >= PROBES // 2 and all(c.process_kind != kind for c in self.tried)

    def _has_enough(self) -> bool:
        kinds = len(
            {self.kind(each) for each in self.tried if not {*each.options} & {*self.measured} or each.options[1:]}
        )
        return kinds > self.finalists or self.counts >= COUNTS or self.probes >= PROBES

    def _is_too_slow(self, candidate: PlanCandidate) -> bool:
        """Return True if a candidate is expected to be far slower than the best candidate.

        The expected time is scaled from the probe that gives the lowest time.
        """
        fastest = min((other.least_step / other.relative for other in self.tried if other.timing), default=0.0)
        return candidate.expected * fastest > NEAR * self.bar

    def combinations(self) -> Iterator[PlanCandidate]:
        """Yield all legal combinations of options. The unchanged recipe is first."""
        choices = [[None, *(option for option in axis if option in self.singles)] for axis in self.options.values()]
        for chosen in product(*choices):
            options = tuple(option for option in chosen if option is not None)
            dropped = [name for option in options for name in option.drops]
            if len(dropped) > len({*dropped}):  # two options replace the same technique
                continue
            candidate = self.candidate(options)
            with suppress(ThriftyError):
                refuse_illegal(candidate.techniques)
                yield candidate

    def _promising(self) -> Iterator[PlanCandidate]:
        """Yield combinations, sorted by expected time, then by number of changes."""
        changed = (candidate for candidate in self.combinations() if candidate.options)
        ordered = sorted(changed, key=lambda c: (round(c.expected, 3), len(c.options)))
        yield from (candidate for candidate in ordered if self._expected(candidate) <= self.processes.room(candidate))
        # estimates may be too high, so combinations slightly above the limit are last, in order of size
        above = [(self._expected(candidate), candidate) for candidate in ordered]
        little_above = [pair for pair in above if 1 < pair[0] / self.processes.room(pair[1]) <= TOO_HIGH]
        yield from (candidate for _, candidate in sorted(little_above, key=lambda pair: pair[0]))

    def _time_gains(self) -> None:
        """Probe each proven gain alone, even if it does not fit, so that combinations are ordered by its step time on
        this machine. A gain whose probe fails is refused."""
        for option in self.options.get(GAINS, ()):
            if () not in self.fastest_steps or option not in self.singles or self._is_late():
                continue
            probes = self.probes
            if counted := self.counted_candidate(self.candidate((option,))):
                self.run_if_possible(counted)
            if counted and counted.options in self.fastest_steps:
                self.measured[option] = self.fastest_steps[counted.options] / self.fastest_steps[()]
                alone = self.candidate(counted.options).relative
                self.tried = [replace(c, relative=alone) if c.options == counted.options else c for c in self.tried]
            elif counted and self.probes > probes:
                del self.singles[option]
                self.refused[option] = self.misfits.get(counted.options, "its steps were not completed")

    def try_out(self, candidate: PlanCandidate) -> None:
        """Count the footprint of a candidate and probe the candidate. Skip candidates that only add slower options to a
        tried candidate."""
        alike = sum(self.kind(other) == self.kind(candidate) for other in self.tried)
        if (
            candidate.options in self.fastest_steps
            or alike >= ALIKE
            or any(self._only_costs(candidate, other) for other in self.tried)
        ):
            return
        counted = self.counted_candidate(candidate)
        if counted is None:
            return
        if not self.processes.fits(counted):
            self.misfits[candidate.options] = self.processes.misfit(counted)
            return
        self.run_candidate(counted)

    def _try_recipe(self) -> None:
        """Probe the unchanged recipe, even if its counted footprint does not fit.

        The step time determines the time limit of planning. The process memory is used for other candidates.
        """
        if base := self.counted_candidate(self.candidate(())):
            self.run_if_possible(base)

    def _try_leanest(self) -> None:
        """Probe up to two combinations whose counted footprint does not fit. Raises InfeasibleError if neither
        fits.

        The first is the fastest combination that would fit with the smallest measured process of its kind. Its probe
        measures the bytes in addition to tensors, so the probe may show that other combinations fit. The second is the
        combination with the smallest expected process.
        """
        waiting = [c for c in self.combinations() if c.options not in {*self.needs, *self.failed}]
        runs = counts = 0
        while waiting and not self.tried and counts < COUNTS:
            fitting = [c for c in waiting if not runs and self._expected_least(c) <= self.memory]
            chosen = min(fitting, key=lambda c: c.expected) if fitting else min(waiting, key=self._expected_least)
            least = self._expected_least(chosen)
            if least >= min(self.needs.values(), default=(inf,))[0]:
                break
            if runs > 1 and least > self.memory:
                break
            if (runs or counts >= FINALISTS) and self._is_late():
                break
            waiting.remove(chosen)
            counts += 1
            if counted := self.counted_candidate(chosen):
                runs += 1
                self.run_if_possible(counted)
        if not self.tried:
            raise self._no_candidate()

    def _only_costs(self, candidate: PlanCandidate, other: PlanCandidate) -> bool:
        more = {*candidate.options} - {*other.options}
        slower = all(self.relative(option) * option.relative_steps >= 1 for option in more)
        return {*other.options} <= {*candidate.options} and slower

    def best(self, among: Collection[PlanCandidate] = ()) -> PlanCandidate:
        """Return the best tried candidate, or an equally good candidate (within noise) with fewer changes."""
        ordered = [candidate for candidate in self.ranked() if not among or candidate in among]
        best = ordered[0]
        for other in sorted(ordered[1:], key=lambda c: len(c.options)):
            if len(other.options) < len(best.options) and self.seconds(other) <= self.seconds(best) * (
                1 + self.noise(best)
            ):
                return other
        return best

    def ranked(self) -> list[PlanCandidate]:
        return sorted(self.tried, key=lambda c: (self.seconds(c), len(c.options)))

    def noise(self, candidate: PlanCandidate) -> float:
        spread = candidate.timing.spread if candidate.timing else 0.0
        return max(NO_DIFFERENCE, spread / 2)

    def _refuse_less_than_a_process(self) -> None:
        """Raise InfeasibleError if a process without a model already exceeds the memory limit."""
        before = self.processes.processes.get(1, 0.0 if self.time else self.process)
        if before > self.memory and self.needs:
            needed, least = min(self.needs.values())
            raise InfeasibleError(
                f"no combination fits in {self.memory / 1e6:,.4g} MB: "
                f"a process holds {before / 1e6:,.0f} MB before it builds the model; {least}",
                fix=f"--memory {ceil(needed / 1e6)}MB, which the unchanged recipe requires",
            )

    def _no_candidate(self) -> InfeasibleError:
        """Return the error of a search without a candidate that fits and completed its steps."""
        if failures := [why for options, why in self.misfits.items() if options in self.failed]:
            return InfeasibleError(
                f"no candidate that fits {self.memory / 1e6:,.0f} MB completed its steps: {failures[0]}",
                fix="thrifty train RECIPE --budget 5steps (prints the whole error); or --no-probe",
            )
        if full := next((why for why in self.misfits.values() if why.startswith(NO_ROOM)), ""):
            return InfeasibleError(f"the counted candidate {full}", fix="a larger --disk; or --set checkpoints.keep=1")
        if not self.needs:
            return InfeasibleError(
                f"every combination is refused: {next(iter(self.misfits.values()))}",
                fix="remove the refused technique or setting",
            )
        needed, what = min(self.needs.values())
        among, further = "no allowed combination", ""
        if self.stopped:
            among = f"stopped after {self.seconds_taken:.0f} s and skipped {self.stopped}: no tried combination"
            further = f"--seconds {self.further_seconds}; or "
        wider = "".join(f"--allow {each.value}; or " for each in NUMERICS_ORDER if each in self.wider)
        return InfeasibleError(
            f"{among} fits in {self.memory / 1e6:,.4g} MB: {what}",
            fix=f"{further}--memory {ceil(needed / 1e6)}MB; or {wider}a smaller model, data.length or data.batch",
        )
