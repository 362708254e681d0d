"""The search of a plan: single ways are counted, their combinations estimated from those, the best counted, and the
very best run.

Estimates only decide what is looked at first. What is proposed was counted to fit and, where probes are allowed, has
run its steps within the memory that was asked for.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil, inf, prod
from statistics import median
from time import monotonic
from typing import NoReturn

from thrifty.composition.compose import refuse_illegal
from thrifty.core.errors import InfeasibleError, ThriftyError, reason_of
from thrifty.core.footprint import Footprint
from thrifty.planning.cost_estimates import StepTiming
from thrifty.planning.plan_candidate import PlanCandidate
from thrifty.planning.probe_jobs import ProbeError
from thrifty.planning.search_space import MICRO_BATCHES, ONE_RANK, PlanOption, apply_options
from thrifty.planning.single_options import SingleOptionCosts

FINALISTS, COUNTS, PROBES, ALIKE = 4, 48, 8, 2
"""Candidates that are run beside the recipe as it is; most combinations counted; most probes; most candidates that
differ in micro-batches alone."""
TOO_HIGH = 1.25
"""By how much an estimate of what a combination holds may exceed what is counted then."""
NEAR = 1.25
"""By how much a step may be expected to take longer than the best that was run, and still be run."""
NO_DIFFERENCE = 0.03
"""A candidate that changes more must be faster by more than this share, and by more than its own noise."""
COUNTING = 0.5
"""The share of a plan's time in which options are counted; the rest is for probes."""
SOME_PROBE = 10.0
"""Seconds that a probe is expected to take as long as none was made."""

NO_ROOM = "does not fit the disk"

TimeOf = Callable[[PlanCandidate, float], StepTiming]
"""The timing of a candidate by a probe, which may leave out what is of no use where its step takes longer than so many
seconds. Raises ProbeError."""


@dataclass
class PlanSearch(SingleOptionCosts):
    """`memory` is in bytes; `margin` is by how much a run may hold more than a probe did; `process` are bytes that a
    process on a processor holds without its run, as far as is known before one was probed."""

    memory: float = inf
    margin: float = 1.1
    time: TimeOf | None = None
    finalists: int = FINALISTS
    no_room: Callable[[PlanCandidate], str] = lambda candidate: ""
    """Why something else than memory does not suffice for a candidate that was counted; "" where all does."""
    shared: bool = False
    """Whether the memory is there for all ranks together, and not for each."""
    process: float = 0.0
    free: float = inf
    """Bytes that this machine has for a probe."""
    allowance: Callable[[float], float] = lambda step: inf
    """The seconds that a plan may take, by those of the fastest step so far; infinite where none was timed."""
    began: float = field(default_factory=monotonic)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.footprints: dict[tuple[PlanOption, ...], Footprint] = {}
        self.tried: list[PlanCandidate] = []
        """Those that were run, or, without probes, counted to fit."""
        self.misfits: dict[tuple[PlanOption, ...], str] = {}
        """Candidates that were counted or run and do not fit, or whose probe failed, and why."""
        self.failed: set[tuple[PlanOption, ...]] = set()
        """Candidates that were counted to fit and whose probe failed."""
        self.needs: dict[tuple[PlanOption, ...], tuple[float, str]] = {}
        """The bytes that a plan requires for candidates that do not fit: of those that were run, and of the leanest
        where this machine has no room to run it. With a text of how that is known."""
        self.surpluses: dict[tuple[bool, bool, int], list[float]] = defaultdict(list)
        """Bytes that runs were seen to hold beyond their tensors, by the kind of process."""
        self.processes: dict[int, float] = {}
        """The fewest bytes that a process was seen to hold before it built the model, by the number of ranks."""
        self.probes = 0
        self.fastest, self.longest_probe = inf, SOME_PROBE
        """Seconds of the fastest step that was run, whether it fits or not, and of the longest probe."""
        self.stopped = ""
        """Work that was skipped because the time for planning was up; empty if none."""

    def run(self) -> PlanCandidate:
        """The best candidate; raises InfeasibleError, saying what to relax and by how much, where none fits. Whatever
        the time, one candidate is run, and nothing is said not to fit before the leanest was."""
        self.say(f"the recipe as it is: {self.plainest.memory / 1e6:,.0f} MB counted")
        self._try_recipe()
        self._refuse_less_than_a_process()
        self.look_at_singles()
        self.counts = 0
        for candidate in self._promising():
            if self._has_enough() or self._is_late():
                break
            if not (self._is_behind(candidate) or self._is_hopeless(candidate)):
                self.try_out(candidate)
        if not self.tried:
            self._try_leanest()
        return self.best()

    @property
    def seconds_taken(self) -> float:
        return monotonic() - self.began

    @property
    def seconds_left(self) -> float:
        return self.allowance(self.fastest) - self.seconds_taken

    @property
    def further_seconds(self) -> int:
        """The seconds to offer where the time for planning was up."""
        return ceil(max(2 * self.seconds_taken, 2 * self.allowance(self.fastest), 60))

    def fits(self) -> bool:
        return bool(self.tried)

    def is_counting_late(self) -> bool:
        has_each_axis = len(self.singles) + len(self.refused) >= len(self.ways)
        for_probes = (1 - COUNTING) * self.allowance(self.fastest) if self.time else 0.0
        if not has_each_axis or self.seconds_left >= for_probes:
            return False
        self.stopped = "options that were not counted"
        return True

    def _is_late(self) -> bool:
        """Return True if no time is left for another probe. There always is for the first one beside the recipe as it
        is: what is expected to be fastest is run before what is leanest."""
        begun = self.tried or self.probes > 1 or self.counts >= FINALISTS
        if not begun or self.seconds_left > (self.longest_probe if self.time else 0.0):
            return False
        self.stopped = "combinations that were not tried"
        return True

    def beyond(self, candidate: PlanCandidate, of: Callable[[list[float]], float] = median) -> float:
        """Bytes that a run holds beyond its tensors, as those of its kind of process did. Before one was run, compiled
        code is expected to hold what other code does, and nothing is known of the rest."""
        own = self.surpluses[candidate.process_kind] or self.surpluses[False, *candidate.process_kind[1:]]
        return of(own) if own else 0.0

    def before_model(self, candidate: PlanCandidate) -> float:
        """Bytes that its process holds before it builds the model."""
        return self.processes.get(candidate.ranks, self.process)

    def _expected(self, candidate: PlanCandidate, of: Callable[[list[float]], float] = median) -> float:
        """Bytes that its process is expected to hold, before it was counted."""
        return self.before_model(candidate) + self.estimated(candidate.ways) + self.beyond(candidate, of)

    def _expected_least(self, candidate: PlanCandidate) -> float:
        """Bytes that a plan would require for it, if it held as little as any of its kind did."""
        before = self.before_model(candidate)
        return (before + (self._expected(candidate, min) - before) * self.margin) * self._sharing(candidate)

    def _is_hopeless(self, candidate: PlanCandidate) -> bool:
        """Return True if half of all allowed probes were of the candidate's kind of process, and none fitted."""
        kind = candidate.process_kind
        return len(self.surpluses[kind]) >= PROBES // 2 and all(c.process_kind != kind for c in self.tried)

    def room(self, candidate: PlanCandidate) -> float:
        """Bytes that each of its ranks may hold."""
        return self.memory / self._sharing(candidate)

    def _has_enough(self) -> bool:
        kinds = len({*map(self.kind, self.tried)})
        return kinds > self.finalists or self.counts >= COUNTS or self.probes >= PROBES

    def _is_behind(self, candidate: PlanCandidate) -> bool:
        """Whether it is expected far from the best, even if it does as well as the luckiest of those that were run."""
        run = [other for other in self.tried if other.timing]
        luckiest = min((other.least_step / other.relative for other in run), default=0.0)
        return candidate.relative * luckiest > NEAR * self.bar

    @property
    def bar(self) -> float:
        """Seconds of the fastest step so far."""
        return min((candidate.least_step for candidate in self.tried if candidate.timing), default=inf)

    def kind(self, candidate: PlanCandidate) -> frozenset[PlanOption]:
        """Its ways but for the micro-batches: candidates of a kind share a probe. A joint loss is computed in another
        manner when its batch is cut, and ranks send something for each step and something for each micro-batch."""
        uncut = self.plain.objective.joint or candidate.ranks > 1
        return frozenset(way for way in candidate.ways if uncut or way.axis != MICRO_BATCHES)

    def combinations(self) -> Iterator[PlanCandidate]:
        """All that may go together, the recipe as it is first."""
        choices = [[None, *(way for way in some if way in self.singles)] for some in self.ways.values()]
        for chosen in product(*choices):
            ways = tuple(way for way in chosen if way is not None)
            candidate = self._candidate(ways)
            with suppress(ThriftyError):
                refuse_illegal(candidate.techniques)
                yield candidate

    def _candidate(self, ways: tuple[PlanOption, ...]) -> PlanCandidate:
        techniques = apply_options(ways, self.base)
        return PlanCandidate(ways, techniques, self.plain.source.batch, prod(map(self.relative, ways)))

    def _promising(self) -> Iterator[PlanCandidate]:
        """Combinations from the fastest; of equal ones that which changes least."""
        changed = (candidate for candidate in self.combinations() if candidate.ways)
        ordered = sorted(changed, key=lambda c: (round(c.relative, 3), len(c.ways)))
        yield from (candidate for candidate in ordered if self._expected(candidate) <= self.room(candidate))
        # an estimate may be too high as well: what is little above comes last, the least first
        above = [(self._expected(candidate), candidate) for candidate in ordered]
        little_above = [pair for pair in above if 1 < pair[0] / self.room(pair[1]) <= TOO_HIGH]
        yield from (candidate for _, candidate in sorted(little_above, key=lambda pair: pair[0]))

    def try_out(self, candidate: PlanCandidate) -> None:
        """Count it, and run it if it fits and is not one that was tried with something that only costs."""
        alike = sum(self.kind(other) == self.kind(candidate) for other in self.tried)
        if alike >= ALIKE or any(self._only_costs(candidate, other) for other in self.tried):
            return
        counted = self._counted(candidate)
        if counted is None:
            return
        if self._least_room(counted) > self.room(candidate):
            self.misfits[candidate.ways] = self._misfit(counted)
            return
        self._run(counted)

    def _try_recipe(self) -> None:
        """Run the recipe as it is even where it was counted not to fit: how long its steps take says how long planning
        may, and what its process holds is known of others then."""
        if base := self._counted(self._candidate(())):
            self._run_if_possible(base)

    def _run_if_possible(self, candidate: PlanCandidate) -> None:
        """Run what may not fit where this machine has room for it; where nothing is run, take it if it fits."""
        needed = self._least_room(candidate)
        if needed <= (self.room(candidate) if self.time is None else self.free / candidate.ranks):
            self._run(candidate)
            return
        self.misfits[candidate.ways] = why = self._misfit(candidate)
        least = f"the least is about {needed * self._sharing(candidate) / 1e6:,.0f} MB, with {candidate.label} ({why})"
        self.needs[candidate.ways] = needed * self._sharing(candidate), least

    def _sharing(self, candidate: PlanCandidate) -> int:
        """Return the number of ranks that the memory is for."""
        return candidate.ranks if self.shared else 1

    def _misfit(self, candidate: PlanCandidate) -> str:
        beyond = self.before_model(candidate) + self.beyond(candidate)
        besides = f", and {beyond / 1e6:,.0f} MB of the process besides" if beyond else ""
        return f"does not fit: {candidate.tensors / 1e6:,.0f} MB counted{besides}"

    def _counted(self, candidate: PlanCandidate) -> PlanCandidate | None:
        """The candidate with its footprint; None where a technique refuses, or the disk has no room for it."""
        try:
            footprint = self._footprint(candidate.ways)
            undivided = self._footprint(tuple(way for way in candidate.ways if way.mesh == ONE_RANK))
        except Exception as refusal:  # a bug of one option is no reason to end the plan
            self.misfits[candidate.ways] = reason_of(refusal)
            return None
        counted = replace(candidate, footprint=footprint, undivided=undivided)
        if lacks := self.no_room(counted):
            self.misfits[candidate.ways] = lacks
            return None
        return counted

    def _least_room(self, candidate: PlanCandidate) -> float:
        """Bytes that each of its ranks must be allowed to hold, before it was run."""
        seen = (candidate.tensors + self.beyond(candidate)) * self.margin
        return self.before_model(candidate) + max(candidate.tensors * candidate.counted_high, seen)

    def _run(self, candidate: PlanCandidate) -> None:
        """Run it, where probes are made, and keep it if it fits."""
        timed = candidate if self.time is None else self._timed(candidate)
        if self.time is None or timed.timing is not None:
            self.tried.append(timed)

    def _try_leanest(self) -> None:
        """Run two combinations that were counted not to fit: the fastest that fits if its process holds as little as
        any of its kind did, and that whose process is expected to hold least. The first shows what its kind of process
        holds beyond its tensors, and then what may fit if it holds as little as that. Raises InfeasibleError where
        nothing fits."""
        waiting = [c for c in self.combinations() if c.ways not in {*self.needs, *self.failed}]
        runs = 0
        while waiting and not self.tried:
            fitting = [c for c in waiting if not runs and self._expected_least(c) <= self.memory]
            chosen = min(fitting, key=lambda c: c.relative) if fitting else min(waiting, key=self._expected_least)
            least = self._expected_least(chosen)
            if least >= min(self.needs.values(), default=(inf,))[0]:
                break
            if runs and ((runs > 1 and least > self.memory) or self._is_late()):
                break
            waiting.remove(chosen)
            if counted := self._counted(chosen):
                runs += 1
                self._run_if_possible(counted)
        if not self.tried:
            self._raise_infeasible()

    def _footprint(self, ways: tuple[PlanOption, ...]) -> Footprint:
        if not ways:
            return self.plainest
        if ways not in self.footprints:
            self.footprints[ways] = self.alone(ways[0]) if len(ways) == 1 else self.counted(ways)
        return self.footprints[ways]

    def _only_costs(self, candidate: PlanCandidate, other: PlanCandidate) -> bool:
        more = {*candidate.ways} - {*other.ways}
        return {*other.ways} <= {*candidate.ways} and all(self.relative(way) >= 1 for way in more)

    def _timed(self, candidate: PlanCandidate) -> PlanCandidate:
        """With its timing, its own or that of one which differs in micro-batches alone and held more; without one
        where that fails, or where it held more than fits."""
        assert self.time is not None
        rows = -(-candidate.batch // candidate.parts)
        alike = (c for c in self.tried if self.kind(c) == self.kind(candidate))
        sibling = next((c for c in alike if c.timing and rows <= c.timing.rows[-1]), None)
        if sibling is not None:
            return replace(candidate, timing=_lighter(sibling, candidate))
        self.say(f"running {candidate.label}")
        self.probes += 1
        began = monotonic()
        try:
            timing = self.time(candidate, NEAR * self.bar)
        except ProbeError as failure:
            self.misfits[candidate.ways] = failure.what
            if self._least_room(candidate) <= self.room(candidate):
                self.failed.add(candidate.ways)
            self.say(failure.what)
            return candidate
        finally:
            self.longest_probe = max(self.longest_probe, monotonic() - began)
        whole = timing.process + timing.memory
        self.surpluses[candidate.process_kind].append(max(timing.memory - candidate.tensors, 0.0))
        self.processes[candidate.ranks] = min(self.processes.get(candidate.ranks, inf), timing.process)
        self.fastest = min(self.fastest, timing.least_step(candidate.batch, candidate.parts))
        before = f", {timing.process / 1e6:,.0f} MB of it before it builds the model" if timing.process else ""
        took = f"its process took {whole / 1e6:,.0f} MB{before}"
        self.say(f"its steps take {timing.step(candidate.batch, candidate.parts):.3g} s, and {took}")
        needed = timing.process + timing.memory * self.margin
        if needed > self.room(candidate):
            least = f"the least that was run is {candidate.label}: {took}"
            self.needs[candidate.ways] = needed * self._sharing(candidate), least
            self.misfits[candidate.ways] = f"does not fit: {took} when it was run"
            return candidate
        return replace(candidate, timing=timing)

    def best(self) -> PlanCandidate:
        """The fastest of those tried, unless one that changes less is as fast within what can be told apart."""
        ordered = self.ranked()
        best = ordered[0]
        for other in sorted(ordered[1:], key=lambda c: len(c.ways)):
            if len(other.ways) < len(best.ways) and self.seconds(other) <= self.seconds(best) * (1 + self.noise(best)):
                return other
        return best

    def ranked(self) -> list[PlanCandidate]:
        return sorted(self.tried, key=lambda c: (self.seconds(c), len(c.ways)))

    def seconds(self, candidate: PlanCandidate) -> float:
        """Of a step, or of one that takes 1 by the recipe as it is where nothing was run."""
        return candidate.relative if candidate.timing is None else candidate.least_step

    def noise(self, candidate: PlanCandidate) -> float:
        spread = candidate.timing.spread if candidate.timing else 0.0
        return max(NO_DIFFERENCE, spread / 2)

    def _refuse_less_than_a_process(self) -> None:
        """Raises InfeasibleError where not even a process without a model fits, so that no option is of help."""
        before = self.processes.get(1, 0.0 if self.time else self.process)
        if before > self.memory and self.needs:
            needed, least = min(self.needs.values())
            raise InfeasibleError(
                f"no combination fits in {self.memory / 1e6:,.4g} MB: "
                f"a process holds {before / 1e6:,.0f} MB before it builds the model; {least}",
                fix=f"--memory {ceil(needed / 1e6)}MB, which the recipe as it is requires",
            )

    def _raise_infeasible(self) -> NoReturn:
        if failures := [why for ways, why in self.misfits.items() if ways in self.failed]:
            raise InfeasibleError(
                f"nothing that fits {self.memory / 1e6:,.0f} MB ran its steps: {failures[0]}",
                fix="thrifty train RECIPE --budget 5steps shows the whole error; --no-probe plans by counts alone",
            )
        if full := next((why for why in self.misfits.values() if why.startswith(NO_ROOM)), ""):
            raise InfeasibleError(f"what was counted {full}", fix="--disk with more, --set checkpoints.keep=1")
        if not self.needs:
            raise InfeasibleError(f"every combination is refused: {next(iter(self.misfits.values()))}")
        needed, what = min(self.needs.values())
        among, further = "no allowed combination", ""
        if self.stopped:
            among = f"stopped after {self.seconds_taken:.0f} s, with {self.stopped}: no combination that was tried"
            further = f"--seconds {self.further_seconds} or "
        raise InfeasibleError(
            f"{among} fits in {self.memory / 1e6:,.4g} MB: {what}",
            fix=f"{further}--memory {ceil(needed / 1e6)}MB, --allow different, or a smaller model, data.length or "
            "data.batch",
        )


def _lighter(sibling: PlanCandidate, candidate: PlanCandidate) -> StepTiming:
    """The timing of a candidate that holds fewer tensors at a time than the one that was run."""
    assert sibling.timing is not None and sibling.footprint is not None and candidate.footprint is not None
    less = max(sibling.footprint.memory - candidate.footprint.memory, 0.0)
    return replace(sibling.timing, memory=max(sibling.timing.memory - less, candidate.footprint.memory))
