"""Event simulation of a pipeline schedule: times of actions, idle times, and live micro-batches per rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from thrifty.simulators.cluster.pipeline_schedules import Result, ScheduleAction, placement, walk


class ActionEvent(NamedTuple):
    """An action on a rank. `start` and `end` are in seconds."""

    rank: int
    action: ScheduleAction
    start: float
    end: float


class StageTransfer(NamedTuple):
    """A transfer of an action's result between ranks. `start` and `end` are in seconds."""

    source: int
    target: int
    action: ScheduleAction
    start: float
    end: float


@dataclass(frozen=True)
class PipelineTimeline:
    """The timeline of one training step of a pipeline."""

    by_rank: list[list[ActionEvent]]
    """Events of each rank, in order."""
    transfers: list[StageTransfer]

    @property
    def ranks(self) -> int:
        return len(self.by_rank)

    @cached_property
    def events(self) -> list[ActionEvent]:
        """Events of all ranks, sorted by rank."""
        return list(chain.from_iterable(self.by_rank))

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return max((events[-1].end for events in self.by_rank if events), default=0.0)

    def busy(self, rank: int) -> float:
        """Return the seconds in which a rank computes."""
        return sum(event.end - event.start for event in self.by_rank[rank])

    @cached_property
    def bubble(self) -> float:
        """Idle fraction of the total time of all ranks.

        Narayanan et al. 2021 report idle time relative to busy time: bubble / (1 - bubble).
        """
        total = self.ranks * self.makespan
        return 1 - sum(map(self.busy, range(self.ranks))) / total if total else 0.0

    def live(
        self, rank: int, size: Callable[[int], float] = lambda stage: 1, for_weights: float = 1.0
    ) -> list[tuple[float, float]]:
        """Return the amount of live activations on a rank as (seconds, amount) pairs, one per change.

        A micro-batch on a stage adds `size(stage)` (1, or bytes) from the start of its forward pass to the end of its
        backward pass. If the backward pass is split, the fraction `for_weights` remains until the gradients of weights
        are computed.
        """
        micro_batches, steps = 0.0, []
        for _, (kind, stage, _), start, end in self.by_rank[rank]:
            change = {"F": 1.0, "B": -1.0, "I": for_weights - 1, "W": -for_weights}[kind] * size(stage)
            micro_batches += change
            steps.append((start if kind == "F" else end, micro_batches))
        return steps

    def peak(self, rank: int, size: Callable[[int], float] = lambda stage: 1, for_weights: float = 1.0) -> float:
        """Return the peak amount of live activations on a rank, see `live`."""
        return max((micro_batches for _, micro_batches in self.live(rank, size, for_weights)), default=0.0)


def play(
    orders: Sequence[Sequence[ScheduleAction]],
    seconds: Callable[[ScheduleAction], float],
    transfer: Callable[[int, int], float] = lambda source, target: 0.0,
    overlap: bool = True,
) -> PipelineTimeline:
    """Simulate a schedule. Each rank runs its actions in order, as soon as their inputs have arrived.

    `seconds(action)` is the duration of an action, and `transfer(source, target)` is the duration of a transfer between
    ranks. Transfers between the same two ranks do not overlap. With `overlap`, the sender computes during a transfer.
    Otherwise, the sender waits until the transfer ends. Raises UsageError if the schedule deadlocks.
    """
    places = placement(orders)
    stages = len(places)
    by_rank: list[list[ActionEvent]] = [[] for _ in orders]
    transfers: list[StageTransfer] = []
    free = [0.0] * len(orders)
    carrying: dict[tuple[int, int], float] = {}
    arrived: dict[Result | None, float] = {None: 0.0}
    for rank, action, needed, result in walk(orders):
        start = max(free[rank], arrived[needed])
        end = start + seconds(action)
        by_rank[rank].append(ActionEvent(rank, action, start, end))
        free[rank] = end
        if result is None:
            continue
        arrived[result] = end
        neighbour = action.stage + (1 if action.kind == "F" else -1)
        if 0 <= neighbour < stages and (target := places[neighbour]) != rank:
            start = max(end, carrying.get((rank, target), 0.0))
            arrived[result] = carrying[rank, target] = start + transfer(rank, target)
            transfers.append(StageTransfer(rank, target, action, start, arrived[result]))
            free[rank] = end if overlap else arrived[result]
    return PipelineTimeline(by_rank, transfers)
