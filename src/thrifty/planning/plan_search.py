"""The search of a plan: single ways are counted, their combinations estimated from those, the best counted, and the
very best run.

Estimates only decide what is looked at first. What is proposed was counted to fit and, where probes are allowed, has
run its steps within the memory that was asked for.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod

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

NO_ROOM = "does not fit the disk"

TimeOf = Callable[[PlanCandidate, float], StepTiming]
"""The timing of a candidate by a probe, which may leave out what is of no use where its step takes longer than so many
seconds. Raises ProbeError."""


@dataclass
class PlanSearch(SingleOptionCosts):
    """`memory` is in bytes; `margin` is by how much resident memory may exceed what a probe saw."""

    memory: float = inf
    margin: float = 1.1
    time: TimeOf | None = None
    finalists: int = FINALISTS
    no_room: Callable[[PlanCandidate], str] = lambda candidate: ""
    """Why something else than memory does not suffice for a candidate that was counted; "" where all does."""
    shared: bool = False
    """Whether the memory is there for all ranks together, and not for each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.footprints: dict[tuple[PlanOption, ...], Footprint] = {}
        self.tried: list[PlanCandidate] = []
        """Those that were run, or, without probes, counted to fit."""
        self.misfits: dict[tuple[PlanOption, ...], str] = {}
        """Candidates that were counted or run and do not fit, or whose probe failed, and why."""
        self.failed: set[tuple[PlanOption, ...]] = set()
        """Those of them whose probe failed."""
        self.surpluses: dict[tuple[bool, int], list[float]] = defaultdict(list)
        """Bytes that processes were seen to hold beyond their tensors, by whether code is compiled, and by ranks."""
        self.probes = 0

    def run(self) -> PlanCandidate:
        """The best candidate; raises InfeasibleError, saying what to relax and by how much, where none fits."""
        self.look_at_singles()
        self.counts = 0
        for candidate in self._promising():
            if self._has_enough():
                break
            if not self._is_behind(candidate):
                self.try_out(candidate)
        if not self.tried:
            self._raise_infeasible()
        return self.best()

    def beyond(self, candidate: PlanCandidate) -> float:
        """Bytes that a process like this one seems to hold beyond its tensors, whatever else is chosen."""
        compiled, ranks = candidate.is_compiled, candidate.ranks
        return min(self.surpluses[compiled, ranks] or self.surpluses[not compiled, ranks], default=0.0)

    def room(self, candidate: PlanCandidate) -> float:
        """Bytes that each of its ranks may hold."""
        return self.memory / candidate.ranks if self.shared else self.memory

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
            techniques = apply_options(ways, self.base)
            try:
                refuse_illegal(techniques)
            except ThriftyError:
                continue
            yield PlanCandidate(ways, techniques, self.plain.source.batch, prod(map(self.relative, ways)))

    def _promising(self) -> Iterator[PlanCandidate]:
        """The recipe as it is, then combinations from the fastest; of equal ones that which changes least."""
        ordered = sorted(self.combinations(), key=lambda c: (bool(c.ways), round(c.relative, 3), len(c.ways)))
        estimates = [(candidate, self.estimated(candidate.ways)) for candidate in ordered]
        yield from (candidate for candidate, memory in estimates if memory <= self.room(candidate))
        # an estimate may be too high as well: what is little above comes last, the least first
        little_above = [pair for pair in estimates if 1 < pair[1] / self.room(pair[0]) <= TOO_HIGH]
        yield from (candidate for candidate, _ in sorted(little_above, key=lambda pair: pair[1]))

    def try_out(self, candidate: PlanCandidate) -> None:
        """Count it, and run it if it fits and is not one that was tried with something that only costs."""
        alike = sum(self.kind(other) == self.kind(candidate) for other in self.tried)
        if alike >= ALIKE or any(self._only_costs(candidate, other) for other in self.tried):
            return
        try:
            footprint = self._footprint(candidate.ways)
            undivided = self._footprint(tuple(way for way in candidate.ways if way.mesh == ONE_RANK))
        except Exception as refusal:  # a bug of one option is no reason to end the plan
            self.misfits[candidate.ways] = reason_of(refusal)
            return
        candidate = replace(candidate, footprint=footprint, undivided=undivided)
        beyond, room = self.beyond(candidate), self.room(candidate)
        memory = footprint.memory + beyond
        if footprint.memory * candidate.counted_high > room or memory * self.margin > room:
            besides = f", and {beyond / 1e6:,.0f} MB of the process besides" if beyond else ""
            self.misfits[candidate.ways] = f"does not fit: {footprint.memory / 1e6:,.0f} MB counted{besides}"
            return
        if lacks := self.no_room(candidate):
            self.misfits[candidate.ways] = lacks
            return
        if self.time is not None:
            candidate = self._timed(candidate)
            if candidate.timing is None:
                return
        self.tried.append(candidate)

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
        try:
            timing = self.time(candidate, NEAR * self.bar)
        except ProbeError as failure:
            self.misfits[candidate.ways] = failure.what
            self.failed.add(candidate.ways)
            self.say(failure.what)
            return candidate
        assert candidate.footprint is not None
        self.surpluses[candidate.is_compiled, candidate.ranks].append(
            max(timing.memory - candidate.footprint.memory, 0.0)
        )
        step = timing.step(candidate.batch, candidate.parts)
        self.say(f"its steps take {step:.3g} s, and its process took {timing.memory / 1e6:,.0f} MB")
        if timing.memory * self.margin > self.room(candidate):
            self.misfits[candidate.ways] = (
                f"does not fit: its process took {timing.memory / 1e6:,.0f} MB when it was run"
            )
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

    def _raise_infeasible(self) -> None:
        if failures := [why for ways, why in self.misfits.items() if ways in self.failed]:
            raise InfeasibleError(
                f"nothing that fits {self.memory / 1e6:,.0f} MB ran its steps: {failures[0]}",
                fix="thrifty train RECIPE --budget 5steps shows the whole error; --no-probe plans by counts alone",
            )
        if full := next((why for why in self.misfits.values() if why.startswith(NO_ROOM)), ""):
            raise InfeasibleError(f"what was counted {full}", fix="--disk with more, --set checkpoints.keep=1")
        least = min(self.combinations(), key=lambda candidate: self.estimated(candidate.ways))
        needed = self.estimated(least.ways) * least.counted_high + self.beyond(least) * self.margin
        why = self.misfits.get(least.ways, "")
        raise InfeasibleError(
            f"nothing that may be changed fits {self.memory / 1e6:,.0f} MB: the least is about {needed / 1e6:,.0f} MB, "
            f"with {least.label}" + (f" ({why})" if why else ""),
            fix=f"--memory {needed * 1.1 / 1e6:.0f}MB, --allow different, or a smaller model, "
            "data.length or data.batch",
        )


def _lighter(sibling: PlanCandidate, candidate: PlanCandidate) -> StepTiming:
    """The timing of a candidate that holds fewer tensors at a time than the one that was run."""
    assert sibling.timing is not None and sibling.footprint is not None and candidate.footprint is not None
    less = max(sibling.footprint.memory - candidate.footprint.memory, 0.0)
    return replace(sibling.timing, memory=max(sibling.timing.memory - less, candidate.footprint.memory))
