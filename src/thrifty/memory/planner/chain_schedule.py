"""When to keep and when to recompute along a chain of stages, so that a step is fastest within a budget of bytes.

The dynamic program is that of Beaumont et al. 2019 (hal-02352969) for chains whose stages differ: the best schedule
among those that keep whatever they once kept until its own backward pass ("memory-persistent"). `simulate` says byte by
byte what a schedule holds and how long it takes; it shares no line with the dynamic program.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from thrifty.core.errors import InfeasibleError, UsageError
from thrifty.memory.recompute_schedule import ChainCost, RecomputeAction, ScheduledOperation

_ALL = 0


@dataclass(frozen=True)
class ScheduleProgress:
    """Where a schedule stands, and its cost so far."""

    due: int
    """The stage whose backward pass is the next one."""
    inputs: frozenset[int] = frozenset({0})
    """Stages whose input is kept."""
    saved: frozenset[int] = frozenset()
    at: int | None = None
    """The stage whose input was just computed, and is kept by nobody."""
    time: float = 0.0
    peak: int = 0


def advance(chain: ChainCost, progress: ScheduleProgress, operation: ScheduledOperation) -> ScheduleProgress:
    """One operation further; raises UsageError for one that is not possible now."""
    do, index = operation
    if not (0 <= index <= progress.due):
        raise UsageError(f"{do.value} of stage {index}, when the backward pass of stage {progress.due} is due")
    return _back(chain, progress, index) if do is RecomputeAction.BACKWARD else _forth(chain, progress, do, index)


def _forth(chain: ChainCost, progress: ScheduleProgress, do: RecomputeAction, index: int) -> ScheduleProgress:
    stage, sizes = chain.stages[index], chain.sizes
    if not (index in progress.inputs or index - 1 in progress.saved or index == progress.at):
        raise UsageError(f"{do.value} of stage {index}, whose input is not there")
    if index in progress.saved:
        raise UsageError(f"{do.value} of stage {index}, of which everything is kept already")
    if do is RecomputeAction.PASS:
        inputs, saved = progress.inputs, progress.saved
        passing_by = index not in inputs and index - 1 not in saved
        needed = sizes[index] * passing_by + sizes[index + 1] + stage.passing
        time, at = stage.forward, index + 1
    elif do is RecomputeAction.KEEP_INPUT:
        inputs, saved = progress.inputs | {index}, progress.saved
        needed, time, at = sizes[index + 1] + stage.passing, stage.forward, index + 1
    else:
        inputs, saved = progress.inputs | {index}, progress.saved | {index}
        needed, at = stage.keeping, None
        time = chain.rerun(index) if index == progress.due else stage.forward
    after = replace(progress, inputs=inputs, saved=saved, at=at, time=progress.time + time)
    return replace(after, peak=max(progress.peak, _held(chain, after) + needed))


def _back(chain: ChainCost, progress: ScheduleProgress, index: int) -> ScheduleProgress:
    stage, sizes = chain.stages[index], chain.sizes
    if index != progress.due or index not in progress.saved:
        raise UsageError(f"backward pass of stage {index}, when that of {progress.due} is due, or nothing saved for it")
    needed = sizes[index] + stage.returning + (sizes[-1] if index == len(chain) - 1 else 0)
    peak = max(progress.peak, _held(chain, progress) + needed)
    inputs, saved = progress.inputs - {index}, progress.saved - {index}
    return ScheduleProgress(index - 1, inputs, saved, None, progress.time + stage.backward, peak)


def _held(chain: ChainCost, progress: ScheduleProgress) -> int:
    """Bytes kept, and the gradient of what comes after the stage that is due, once there is one."""
    sizes = chain.sizes
    inputs = sum(sizes[index] for index in progress.inputs if index - 1 not in progress.saved)
    gradient = sizes[progress.due + 1] if progress.due < len(chain) - 1 else 0
    return inputs + sum(chain.stages[index].saved for index in progress.saved) + gradient


def simulate(chain: ChainCost, schedule: Sequence[ScheduledOperation]) -> tuple[float, int]:
    """Time and peak bytes of a schedule; raises UsageError where it is none."""
    progress = ScheduleProgress(due=len(chain) - 1)
    for operation in schedule:
        progress = advance(chain, progress, operation)
    if progress.due >= 0:
        raise UsageError(f"the schedule ends before the backward pass of stage {progress.due}")
    return progress.time, progress.peak


def periodic_schedule(stages: int, every: int) -> list[ScheduledOperation]:
    """The input of every k-th stage is kept, and the k stages behind it are computed again together; the last k, whose
    backward pass comes at once, keep all (Chen et al. 2016, arXiv 1604.06174)."""
    starts = range(0, stages, every)
    operations: list[ScheduledOperation] = []
    for start in starts:
        run = range(start, min(start + every, stages))
        first, others = RecomputeAction.KEEP_INPUT, RecomputeAction.PASS
        if run.stop == stages:
            first = others = RecomputeAction.KEEP_ALL
        operations += [ScheduledOperation(first if index == start else others, index) for index in run]
    for start in reversed(starts):
        run = range(start, min(start + every, stages))
        if run.stop < stages:
            operations += [ScheduledOperation(RecomputeAction.KEEP_ALL, index) for index in run]
        operations += [ScheduledOperation(RecomputeAction.BACKWARD, index) for index in reversed(run)]
    return operations


def least_bytes(chain: ChainCost) -> int:
    """The smallest budget that any schedule keeps to."""
    return chain.input + int(_LeastBytesTable(chain).need[0, len(chain) - 1])


def optimal_schedule(chain: ChainCost, bytes: int, slots: int = 500) -> list[ScheduledOperation]:
    """The fastest schedule whose peak is within `bytes`. Raises InfeasibleError where there is none, with the least
    budget.

    Bytes are counted in at most `slots` portions. With as many slots as bytes that is exact; with fewer it is the
    fastest of `schedules_near` the budget that keeps to it byte by byte.
    """
    least = least_bytes(chain)
    if bytes < least:
        raise InfeasibleError(
            f"{len(chain)} stages cannot be trained with {bytes:,} bytes of activations",
            fix=f"give them at least {least:,} bytes",
        )
    return list(fastest_within(chain, schedules_near(chain, bytes, slots), bytes))


def fastest_within(
    chain: ChainCost, schedules: Iterable[Sequence[ScheduledOperation]], bytes: int
) -> tuple[ScheduledOperation, ...]:
    """Of these schedules the fastest whose peak is within `bytes`, of equally fast ones the leanest; one must be."""
    costs = {schedule: simulate(chain, schedule) for schedule in dict.fromkeys(map(tuple, schedules))}
    return min((each for each in costs if costs[each][1] <= bytes), key=costs.__getitem__)


def schedules_near(chain: ChainCost, bytes: int, slots: int) -> list[list[ScheduledOperation]]:
    """The one that holds least, periodic ones, and optimal ones for this budget and for larger ones in portions.

    Sizes are rounded up to portions, the budget down: with few portions, schedules for a larger budget may keep to this
    one. What rounding adds is less than a portion for each stage and each input held, so these are looked at one by
    one, and those for up to a fifth more in larger steps.
    """
    leanest = _LeastBytesTable(chain)
    schedules = [_unrolled(chain, lambda first, last, room: (int(leanest.choices(first, last).argmin()), 0, 0), 0)]
    schedules += [periodic_schedule(len(chain), every) for every in range(1, len(chain) + 1)]
    unit = _unit(chain, bytes, slots)
    room = max(bytes // unit - -(-chain.input // unit), 0)
    more = room + room // 5
    fastest = _LeastTimeTable(chain, unit, more)
    near = range(room, min(room + 2 * len(chain), more + 1))
    for slots in (*near, *range(room, more + 1, max(1, room // 50))):
        if np.isfinite(fastest.time[0, len(chain) - 1, slots]):
            schedules.append(_unrolled(chain, fastest.choose, slots))
    return schedules


def _unit(chain: ChainCost, bytes: int, slots: int) -> int:
    """Bytes of a slot: few enough slots, and where it can be, the largest stage a whole number of them."""
    unit = max(1, -(-bytes // slots))
    largest = max(stage.saved for stage in chain.stages)
    return -(-largest // (largest // unit)) if largest >= unit else unit


Choose = Callable[[int, int, int], tuple[int, int, int]]
"""For the stages first … last and some room: the first choice, and the room for the stages behind it and before it."""


def _unrolled(chain: ChainCost, choose: Choose, room: int) -> list[ScheduledOperation]:
    operations: list[ScheduledOperation] = []
    tasks: list[ScheduledOperation | tuple[int, int, int]] = [(0, len(chain) - 1, room)]
    while tasks:
        task = tasks.pop()
        if isinstance(task, ScheduledOperation):
            operations.append(task)
            continue
        first, last, room = task
        choice, after, before = choose(first, last, room)
        if choice == _ALL:
            operations.append(ScheduledOperation(RecomputeAction.KEEP_ALL, first))
            tasks.append(ScheduledOperation(RecomputeAction.BACKWARD, first))
            if first < last:
                tasks.append((first + 1, last, after))
        else:
            split = first + choice
            operations.append(ScheduledOperation(RecomputeAction.KEEP_INPUT, first))
            operations += [ScheduledOperation(RecomputeAction.PASS, index) for index in range(first + 1, split)]
            tasks += [(first, split - 1, before), (split, last, after)]
    return operations


class _Peaks:
    """Bytes that single operations of the segment first … last need, the segment's input not counted."""

    def __init__(self, chain: ChainCost):
        self.chain, self.sizes, n = chain, np.array(chain.sizes, dtype=np.int64), len(chain)
        self.saved = np.array([stage.saved for stage in chain.stages], dtype=np.int64)
        self.gradient = np.array([*self.sizes[1:n], 0], dtype=np.int64)
        self.passing = np.zeros((n, n), dtype=np.int64)
        """[first, j - 1]: the most that forward passes from first through j - 1 hold when they keep nothing."""
        each = self.sizes[1:] + np.array([stage.passing for stage in chain.stages])
        for first in range(n):
            run = each[first:] + self.sizes[first:n]
            run[0] = each[first]
            self.passing[first, first:] = np.maximum.accumulate(run)

    def keep_all(self, first: int, last: int) -> int:
        stage, sizes = self.chain.stages[first], self.sizes
        forward = stage.saved + stage.keeping + self.gradient[last]
        return max(int(forward), int(stage.saved + sizes[first + 1] + sizes[first] + stage.returning))

    def splits(self, first: int, last: int) -> np.ndarray:
        """For each split first + 1 … last."""
        return self.passing[first, first:last] + self.gradient[last]


class _LeastBytesTable:
    """The least bytes for each segment, whatever the time."""

    def __init__(self, chain: ChainCost):
        self.peaks, n = _Peaks(chain), len(chain)
        self.need = np.zeros((n, n), dtype=np.int64)
        for width in range(n):
            for first in range(n - width):
                self.need[first, first + width] = self.choices(first, first + width).min()

    def choices(self, first: int, last: int) -> np.ndarray:
        """The need when everything is kept of the first stage, and for each split."""
        peaks, need = self.peaks, self.need
        all_kept = peaks.keep_all(first, last)
        if first == last:
            return np.array([all_kept])
        all_kept = max(all_kept, peaks.saved[first] + need[first + 1, last])
        behind = peaks.sizes[first + 1 : last + 1] + need[first + 1 : last + 1, last]
        split = np.maximum(np.maximum(behind, need[first, first:last]), peaks.splits(first, last))
        return np.array([all_kept, *split])


class _LeastTimeTable:
    """The least time for each segment and each number of slots, and what to do first for it."""

    def __init__(self, chain: ChainCost, unit: int, slots: int):
        self.chain, self.peaks, self.unit = chain, _Peaks(chain), unit
        n, room = len(chain), slots + 1
        self.sizes, self.saved = -(-self.peaks.sizes // unit), -(-self.peaks.saved // unit)
        self.forward = np.cumsum([stage.forward for stage in chain.stages])
        self.room = np.arange(room)
        self.time = np.full((n, n, room), np.inf)
        self.behind = np.full((n, n, room), np.inf)
        """[last, first]: the time of first … last beside its own input."""
        self.choice = np.zeros((n, n, room), dtype=np.int16)
        for width in range(n):
            for first in range(n - width):
                last = first + width
                choices = self.choices(first, last)
                self.time[first, last], self.choice[first, last] = choices.min(0), choices.argmin(0)
                self.behind[last, first] = self._beside(self.time[first, last], int(self.sizes[first]))

    def _beside(self, time: np.ndarray, slots: int) -> np.ndarray:
        shifted = np.full_like(time, np.inf)
        if slots < len(time):
            shifted[slots:] = time[: len(time) - slots]
        return shifted

    def choices(self, first: int, last: int) -> np.ndarray:
        """Times by room, (1 + splits, room): keep all of the first stage, or keep its input and start at a split."""
        chain, peaks = self.chain, self.peaks
        all_kept = np.full_like(self.room, chain.stages[first].backward, dtype=float)
        if first == last:
            all_kept += chain.rerun(first)
        else:
            all_kept += chain.stages[first].forward
            all_kept += self._beside(self.time[first + 1, last], int(self.saved[first]))
        all_kept[self.room * self.unit < peaks.keep_all(first, last)] = np.inf
        if first == last:
            return all_kept[None]
        on_the_way = self.forward[first:last] - (self.forward[first - 1] if first else 0.0)
        split = on_the_way[:, None] + self.behind[last, first + 1 : last + 1] + self.time[first, first:last]
        split[self.room * self.unit < peaks.splits(first, last)[:, None]] = np.inf
        return np.concatenate([all_kept[None], split])

    def choose(self, first: int, last: int, room: int) -> tuple[int, int, int]:
        choice = int(self.choice[first, last, room])
        if choice == _ALL:
            return _ALL, room - int(self.saved[first]), 0
        return choice, room - int(self.sizes[first + choice]), room
