"""Memory of the processes of plan candidates, predicted from tensors and from probes of similar processes."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from thrifty.planning.cost_estimates import StepTiming
from thrifty.planning.plan_candidate import PlanCandidate

Reduce = Callable[[list[float]], float]


@dataclass
class ProcessMemory:
    """Memory limit of a plan, and the predicted memory of candidates' processes. All sizes are in bytes."""

    limit: float
    is_shared: bool
    """True if the limit is for all ranks together, False if it is per rank."""
    margin: float
    """Factor from the memory of a probe to the maximum memory of a run."""
    process: float
    """Expected size of a process before it builds the model, until the first probe."""
    kept: Callable[[PlanCandidate], float] = lambda candidate: 0.0
    """Function that returns the expected size in addition to tensors, until the first probe."""
    surpluses: dict[tuple[bool, bool, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Measured sizes in addition to tensors, by kind of process."""
    processes: dict[int, float] = field(default_factory=dict)
    """Minimum measured sizes of a process before it builds the model, by number of ranks."""

    def record(self, candidate: PlanCandidate, timing: StepTiming) -> None:
        """Record the memory that a probe measured."""
        self.surpluses[candidate.process_kind].append(max(timing.memory - candidate.tensors, 0.0))
        least = self.processes.get(candidate.ranks, timing.process)
        self.processes[candidate.ranks] = min(least, timing.process)

    def room(self, candidate: PlanCandidate) -> float:
        """Return the limit per rank of a candidate."""
        return self.limit / self.sharing(candidate)

    def sharing(self, candidate: PlanCandidate) -> int:
        """Return the number of ranks that share the limit."""
        return candidate.ranks if self.is_shared else 1

    def before_model(self, candidate: PlanCandidate) -> float:
        """Return the size of a candidate's process before the process builds the model."""
        return self.processes.get(candidate.ranks, self.process)

    def surplus(self, candidate: PlanCandidate, reduce: Reduce = median) -> float:
        """Return the expected size in addition to tensors, from probes of the same kind of process.

        Before the first such probe, a compiled candidate is expected to need as much as the same kind without
        compilation.
        """
        own = self.surpluses[candidate.process_kind] or self.surpluses[False, *candidate.process_kind[1:]]
        return reduce(own) if own else self.kept(candidate)

    def expected(self, candidate: PlanCandidate, tensors: float) -> float:
        """Return the expected size of a candidate's process, from the estimated size of its tensors."""
        return self.before_model(candidate) + tensors + self.surplus(candidate)

    def expected_least(self, candidate: PlanCandidate, tensors: float) -> float:
        """Return the size that a candidate requires on the ranks that share the limit, if its process is as small as
        the smallest measured process of its kind."""
        size = self.before_model(candidate) + (tensors + self.surplus(candidate, min)) * self.margin
        return size * self.sharing(candidate)

    def required(self, candidate: PlanCandidate) -> float:
        """Return the size per rank that a candidate with a footprint is expected to require, before its probe."""
        expected = (candidate.tensors + self.surplus(candidate)) * self.margin
        return self.before_model(candidate) + max(candidate.tensors * candidate.counted_high, expected)

    def fits(self, candidate: PlanCandidate) -> bool:
        return self.required(candidate) <= self.room(candidate)

    def misfit(self, candidate: PlanCandidate) -> str:
        """Return the reason against a candidate that does not fit."""
        beyond = self.before_model(candidate) + self.surplus(candidate)
        process = f", plus {beyond / 1e6:,.0f} MB of the process" if beyond else ""
        return f"does not fit: {candidate.tensors / 1e6:,.0f} MB counted{process}"
