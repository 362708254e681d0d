"""Trials of plan candidates. A footprint is counted, then steps are probed in a separate process."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil, inf, isinf, prod
from time import monotonic

from thrifty.core.errors import reason_of
from thrifty.core.footprint import Footprint
from thrifty.planning.cost_estimates import StepTiming
from thrifty.planning.plan_candidate import PlanCandidate
from thrifty.planning.probe_jobs import ProbeError, ProbeTimeout
from thrifty.planning.process_memory import ProcessMemory
from thrifty.planning.search_space import MICRO_BATCHES, ONE_RANK, PlanOption, apply_options
from thrifty.planning.single_options import SingleOptionCosts

NEAR = 1.25
"""Maximum expected time to equal loss of a candidate to be probed, relative to the best probed candidate."""
SOME_PROBE = 10.0
"""Expected seconds of the first probe."""

TimeOf = Callable[[PlanCandidate, float], StepTiming]
"""Function that probes a candidate. The probe may stop early if a step exceeds the given seconds. Raises ProbeError,
and ProbeTimeout at the time limit."""


@dataclass
class CandidateTrials(SingleOptionCosts):
    """Counted footprints and probes of candidates: those that fit, and the reasons against the others.

    `memory` is the limit in bytes. `margin` is the factor from the memory of a probe to the maximum memory of a run. On
    a CPU, `process` is the expected size in bytes of a process before it builds the model. It is used until the first
    probe.
    """

    memory: float = inf
    margin: float = 1.1
    time: TimeOf | None = None
    no_room: Callable[[PlanCandidate], str] = lambda candidate: ""
    """Function from a candidate with its footprint to a missing resource other than memory; "" if none is missing."""
    shared: bool = False
    """True if `memory` is for all ranks together, False if `memory` is per rank."""
    process: float = 0.0
    kept: Callable[[PlanCandidate], float] = lambda candidate: 0.0
    """Function that returns the bytes of a process in addition to tensors, until the first probe."""
    free: float = inf
    """Free memory of this machine for a probe, in bytes."""
    allowance: Callable[[float], float] = lambda step: inf
    """Function from the seconds of the fastest step (infinite until the first probe) to the time limit of planning."""
    began: float = field(default_factory=monotonic)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.footprints: dict[tuple[PlanOption, ...], Footprint] = {}
        self.tried: list[PlanCandidate] = []
        """Candidates that fit: probed, or only counted if probes are not allowed."""
        self.misfits: dict[tuple[PlanOption, ...], str] = {}
        """Reasons against candidates that do not fit, or whose probe failed."""
        self.failed: set[tuple[PlanOption, ...]] = set()
        """Candidates whose counted footprint fits, but whose probe failed."""
        self.needs: dict[tuple[PlanOption, ...], tuple[float, str]] = {}
        """Required bytes, and their description, of candidates that do not fit. Included are probed candidates, and
        candidates for whose probe this machine has too little memory."""
        self.processes = ProcessMemory(self.memory, self.shared, self.margin, self.process, self.kept)
        self.probes = 0
        self.fastest_steps: dict[tuple[PlanOption, ...], float] = {}
        """Seconds of the fastest step of each probed candidate, even if it does not fit."""
        self.fastest, self.longest_probe = inf, SOME_PROBE
        """Seconds of the fastest probed step (of all candidates, even if they do not fit), and of the longest probe."""
        self.stopped = ""
        """Description of work skipped at the time limit of planning; empty if no work was skipped."""

    @property
    def seconds_taken(self) -> float:
        return monotonic() - self.began

    @property
    def seconds_left(self) -> float:
        return self.allowance(self.fastest) - self.seconds_taken

    @property
    def further_seconds(self) -> int:
        """Longer time limit in seconds, suggested if planning stopped at its time limit."""
        return ceil(max(2 * self.seconds_taken, 2 * self.allowance(self.fastest), 60))

    @property
    def bar(self) -> float:
        """Least time (`seconds`) of all probed candidates that fit."""
        return min((self.seconds(candidate) for candidate in self.tried if candidate.timing), default=inf)

    def seconds(self, candidate: PlanCandidate) -> float:
        """Return the seconds in which a candidate trains as much as the unchanged recipe in a step. Without probes,
        return them relative to the unchanged recipe."""
        return candidate.expected if candidate.timing is None else candidate.least_step * candidate.relative_steps

    def kind(self, candidate: PlanCandidate) -> frozenset[PlanOption]:
        """Return the kind of a candidate: its options without the number of micro-batches. Candidates of one kind share
        a probe.

        Micro-batches are included for joint losses (over all examples of a batch), because micro-batches change the
        computation of such losses. Micro-batches are also included for several ranks, because communication is partly
        per step and partly per micro-batch.
        """
        keeps_parts = self.plain.objective.joint or candidate.ranks > 1
        return frozenset(option for option in candidate.options if keeps_parts or option.axis != MICRO_BATCHES)

    def candidate(self, options: tuple[PlanOption, ...]) -> PlanCandidate:
        techniques = apply_options(options, self.base)
        return PlanCandidate(options, techniques, self.plain.source.batch, prod(map(self.relative, options)))

    def run_if_possible(self, candidate: PlanCandidate) -> None:
        """Probe a candidate if this machine has enough memory for the probe. Without probes, keep the candidate if it
        fits."""
        needed = self.processes.required(candidate)
        if needed <= (self.processes.room(candidate) if self.time is None else self.free / candidate.ranks):
            self.run_candidate(candidate)
            return
        self.misfits[candidate.options] = why = self.processes.misfit(candidate)
        size = needed * self.processes.sharing(candidate)
        least = f"the smallest needs about {size / 1e6:,.0f} MB, with {candidate.label} ({why})"
        self.needs[candidate.options] = size, least

    def counted_candidate(self, candidate: PlanCandidate) -> PlanCandidate | None:
        """Return the candidate with its footprint, or None if a technique refuses the run or the disk is too small."""
        try:
            footprint = self._footprint(candidate.options)
            undivided = self._footprint(tuple(option for option in candidate.options if option.mesh == ONE_RANK))
        except Exception as refusal:  # a bug in one option must not stop planning
            self.misfits[candidate.options] = reason_of(refusal)
            return None
        counted = replace(candidate, footprint=footprint, undivided=undivided)
        if reason := self.no_room(counted):
            self.misfits[candidate.options] = reason
            return None
        return counted

    def run_candidate(self, candidate: PlanCandidate) -> None:
        if self.time is None:
            self.tried.append(candidate)
            return
        timed = self._timed(candidate)
        if timed.timing is not None:
            self.tried.append(timed)
        elif self.time is None:  # the time limit came before any result
            self.run_if_possible(candidate)

    def _footprint(self, options: tuple[PlanOption, ...]) -> Footprint:
        if not options:
            return self.plainest
        if options not in self.footprints:
            self.footprints[options] = self.alone(options[0]) if len(options) == 1 else self.counted(options)
        return self.footprints[options]

    def _timed(self, candidate: PlanCandidate) -> PlanCandidate:
        """Return the candidate with its timing, or without timing if the probe fails or exceeds the memory limit.

        The timing of a candidate with larger micro-batches and otherwise the same options is reused.
        """
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
            timing = self.time(candidate, NEAR * self.bar / candidate.relative_steps)
        except ProbeTimeout as failure:
            self.stopped = "further steps"
            if isinf(self.fastest):
                self.time, self.stopped = None, "all measurements: memory is counted, and time is estimated from FLOPs"
            else:
                self.misfits[candidate.options] = failure.what
            self.say(failure.what)
            return candidate
        except ProbeError as failure:
            self.misfits[candidate.options] = failure.what
            if self.processes.fits(candidate):
                self.failed.add(candidate.options)
            self.say(failure.what)
            return candidate
        finally:
            self.longest_probe = max(self.longest_probe, monotonic() - began)
        whole = timing.process + timing.memory
        self.processes.record(candidate, timing)
        self.fastest_steps[candidate.options] = timing.least_step(candidate.batch, candidate.parts)
        self.fastest = min(self.fastest, self.fastest_steps[candidate.options])
        before = f", {timing.process / 1e6:,.0f} MB of that before the model was built" if timing.process else ""
        measured = f"its process took {whole / 1e6:,.0f} MB{before}"
        self.say(f"its steps take {timing.step(candidate.batch, candidate.parts):.3g} s, and {measured}")
        needed = timing.process + timing.memory * self.margin
        if needed > self.processes.room(candidate):
            least = f"the smallest that was run is {candidate.label}: {measured}"
            self.needs[candidate.options] = needed * self.processes.sharing(candidate), least
            self.misfits[candidate.options] = f"does not fit: {measured} when it was run"
            return candidate
        return replace(candidate, timing=timing)


def _lighter(sibling: PlanCandidate, candidate: PlanCandidate) -> StepTiming:
    """Return the timing of the probed candidate `sibling` for `candidate`, whose tensors are smaller. The memory is
    reduced by the difference."""
    assert sibling.timing is not None and sibling.footprint is not None and candidate.footprint is not None
    less = max(sibling.footprint.memory - candidate.footprint.memory, 0.0)
    return replace(sibling.timing, memory=max(sibling.timing.memory - less, candidate.footprint.memory))
