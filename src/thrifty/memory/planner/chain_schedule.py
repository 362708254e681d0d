"""Schedules for a chain of stages: keep or recompute activations, so that a step is fastest within a budget of bytes.

The dynamic program is from Beaumont et al. 2019 (hal-02352969), for chains of unequal stages. It is optimal among
schedules that keep a saved tensor until the backward pass that uses it ("memory-persistent"). `simulate` computes the
exact peak and time of a schedule. It shares no code with the dynamic program.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from thrifty.core.errors import InfeasibleError, UsageError
from thrifty.memory.recompute_schedule import ChainCost, RecomputeAction, ScheduledOperation

_ALL = 0


@dataclass(frozen=True)
class ScheduleProgress:
    """State of a schedule during simulation, and its cost so far."""

    due: int
    """Stage of the next backward pass."""
    inputs: frozenset[int] = frozenset({0})
    """Stages whose input is kept."""
    saved: frozenset[int] = frozenset()
    at: int | None = None
    """Stage whose input was just computed but is not kept."""
    time: float = 0.0
    peak: int = 0


def advance(chain: ChainCost, progress: ScheduleProgress, operation: ScheduledOperation) -> ScheduleProgress:
    """Return the progress after one more operation. Raise UsageError if the operation is not possible now."""
    do, index = operation
    if not (0 <= index <= progress.due):
        raise UsageError(
            f"invalid schedule: {do.value!r} of stage {index}, but the backward pass of stage {progress.due} comes next"
        )
    return _back(chain, progress, index) if do is RecomputeAction.BACKWARD else _forth(chain, progress, do, index)


def _forth(chain: ChainCost, progress: ScheduleProgress, do: RecomputeAction, index: int) -> ScheduleProgress:
    stage, sizes = chain.stages[index], chain.sizes
    if not (index in progress.inputs or index - 1 in progress.saved or index == progress.at):
        raise UsageError(f"invalid schedule: {do.value!r} of stage {index}, but its input is missing")
    if index in progress.saved:
        raise UsageError(f"invalid schedule: {do.value!r} of stage {index}, but all its tensors are already kept")
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
    return replace(after, peak=max(progress.peak, _kept_bytes(chain, after) + needed))


def _back(chain: ChainCost, progress: ScheduleProgress, index: int) -> ScheduleProgress:
    stage, sizes = chain.stages[index], chain.sizes
    if index != progress.due or index not in progress.saved:
        raise UsageError(
            f"invalid schedule: backward pass of stage {index}, but stage {progress.due} comes next or nothing is saved"
        )
    needed = sizes[index] + stage.returning + (sizes[-1] if index == len(chain) - 1 else 0)
    peak = max(progress.peak, _kept_bytes(chain, progress) + needed)
    inputs, saved = progress.inputs - {index}, progress.saved - {index}
    return ScheduleProgress(index - 1, inputs, saved, None, progress.time + stage.backward, peak)


def _kept_bytes(chain: ChainCost, progress: ScheduleProgress) -> int:
    """Return the kept bytes, including the gradient of the output of stage `due` if this gradient exists."""
    sizes = chain.sizes
    inputs = sum(sizes[index] for index in progress.inputs if index - 1 not in progress.saved)
    gradient = sizes[progress.due + 1] if progress.due < len(chain) - 1 else 0
    return inputs + sum(chain.stages[index].saved for index in progress.saved) + gradient


def simulate(chain: ChainCost, schedule: Sequence[ScheduledOperation]) -> tuple[float, int]:
    """Return the time and the peak bytes of a schedule. Raise UsageError if the schedule is invalid."""
    progress = ScheduleProgress(due=len(chain) - 1)
    for operation in schedule:
        progress = advance(chain, progress, operation)
    if progress.due >= 0:
        raise UsageError(f"invalid schedule: no backward pass of stage {progress.due}")
    return progress.time, progress.peak


def periodic_schedule(stages: int, every: int) -> list[ScheduledOperation]:
    """Return the schedule that keeps the input of every `every`-th stage, and recomputes stages in groups of `every`.

    The last group keeps everything, because its backward pass follows directly (Chen et al. 2016, arXiv 1604.06174).
    """
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
    """Return the smallest budget in bytes for which a schedule exists."""
    return chain.input + int(_LeastBytesTable(chain).need[0, len(chain) - 1])


def optimal_schedule(chain: ChainCost, bytes: int, slots: int = 500) -> list[ScheduledOperation]:
    """Return the fastest schedule with a peak within `bytes`. Raise InfeasibleError with the smallest possible budget
    if no schedule fits. Bytes are counted in at most `slots` units. The result is exact if there is one unit per byte.
    With fewer units, the result is the fastest of `schedules_near` whose exact peak fits.
    """
    least = least_bytes(chain)
    if bytes < least:
        raise InfeasibleError(
            f"{len(chain)} stages cannot be trained with {bytes:,} bytes of activations",
            fix=f"allow at least {least:,} bytes",
        )
    return list(fastest_within(chain, schedules_near(chain, bytes, slots), bytes))


def fastest_within(
    chain: ChainCost, schedules: Iterable[Sequence[ScheduledOperation]], bytes: int
) -> tuple[ScheduledOperation, ...]:
    """Return the fastest schedule with a peak within `bytes`; of equally fast schedules, the schedule with the smallest
    peak.

    At least one schedule must fit.
    """
    costs = {schedule: simulate(chain, schedule) for schedule in dict.fromkeys(map(tuple, schedules))}
    return min((each for each in costs if costs[each][1] <= bytes), key=costs.__getitem__)


def schedules_near(chain: ChainCost, bytes: int, slots: int) -> list[list[ScheduledOperation]]:
    """Return candidates: the schedule with the smallest peak, periodic schedules, and optimal schedules for this budget
    and larger budgets.

    Sizes are rounded up to units, and the budget is rounded down. With few units, the schedule for a larger budget may
    therefore fit this budget. Rounding adds less than one unit per stage and per kept input, so budgets in this range
    are tried one by one. Larger budgets, up to 20 % more, are tried in larger steps.
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
    """Return the bytes per unit, for at most `slots` units. If possible, the size of the largest stage is a multiple of
    the unit."""
    unit = max(1, -(-bytes // slots))
    largest = max(stage.saved for stage in chain.stages)
    return -(-largest // (largest // unit)) if largest >= unit else unit


Choose = Callable[[int, int, int], tuple[int, int, int]]
"""Function of (first stage, last stage, room): returns the first choice, and the room for later and earlier stages."""


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
    """Peak bytes of single operations in the segment first … last, without the segment's input."""

    def __init__(self, chain: ChainCost):
        self.chain, self.sizes, n = chain, np.array(chain.sizes, dtype=np.int64), len(chain)
        self.saved = np.array([stage.saved for stage in chain.stages], dtype=np.int64)
        self.gradient = np.array([*self.sizes[1:n], 0], dtype=np.int64)
        self.passing = np.zeros((n, n), dtype=np.int64)
        """Index [first, j - 1]: peak bytes of forward passes of stages first … j - 1 that keep nothing."""
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
        """Return the peak bytes for each split point first + 1 … last."""
        return self.passing[first, first:last] + self.gradient[last]


class _LeastBytesTable:
    """Minimum bytes of each segment, whatever its time."""

    def __init__(self, chain: ChainCost):
        self.peaks, n = _Peaks(chain), len(chain)
        self.need = np.zeros((n, n), dtype=np.int64)
        for width in range(n):
            for first in range(n - width):
                self.need[first, first + width] = self.choices(first, first + width).min()

    def choices(self, first: int, last: int) -> np.ndarray:
        """Return the bytes if the first stage keeps everything, and the bytes for each split point."""
        peaks, need = self.peaks, self.need
        all_kept = peaks.keep_all(first, last)
        if first == last:
            return np.array([all_kept])
        all_kept = max(all_kept, peaks.saved[first] + need[first + 1, last])
        after = peaks.sizes[first + 1 : last + 1] + need[first + 1 : last + 1, last]
        split = np.maximum(np.maximum(after, need[first, first:last]), peaks.splits(first, last))
        return np.array([all_kept, *split])


class _LeastTimeTable:
    """Minimum time of each segment for each number of units, and the first choice that reaches it."""

    def __init__(self, chain: ChainCost, unit: int, slots: int):
        self.chain, self.peaks, self.unit = chain, _Peaks(chain), unit
        n, room = len(chain), slots + 1
        self.sizes, self.saved = -(-self.peaks.sizes // unit), -(-self.peaks.saved // unit)
        self.forward = np.cumsum([stage.forward for stage in chain.stages])
        self.room = np.arange(room)
        self.time = np.full((n, n, room), np.inf)
        self.with_input = np.full((n, n, room), np.inf)
        """Index [last, first]: time of first … last if the input of the segment is also kept."""
        self.choice = np.zeros((n, n, room), dtype=np.int16)
        for width in range(n):
            for first in range(n - width):
                last = first + width
                choices = self.choices(first, last)
                self.time[first, last], self.choice[first, last] = choices.min(0), choices.argmin(0)
                self.with_input[last, first] = self._shifted(self.time[first, last], int(self.sizes[first]))

    def _shifted(self, time: np.ndarray, slots: int) -> np.ndarray:
        shifted = np.full_like(time, np.inf)
        if slots < len(time):
            shifted[slots:] = time[: len(time) - slots]
        return shifted

    def choices(self, first: int, last: int) -> np.ndarray:
        """Return times by choice and room, (1 + splits, room). Choice 0 keeps everything of the first stage. Choice i
        keeps only the input and splits at stage first + i.
        """
        chain, peaks = self.chain, self.peaks
        all_kept = np.full_like(self.room, chain.stages[first].backward, dtype=float)
        if first == last:
            all_kept += chain.rerun(first)
        else:
            all_kept += chain.stages[first].forward
            all_kept += self._shifted(self.time[first + 1, last], int(self.saved[first]))
        all_kept[self.room * self.unit < peaks.keep_all(first, last)] = np.inf
        if first == last:
            return all_kept[None]
        passing = self.forward[first:last] - (self.forward[first - 1] if first else 0.0)
        split = passing[:, None] + self.with_input[last, first + 1 : last + 1] + self.time[first, first:last]
        split[self.room * self.unit < peaks.splits(first, last)[:, None]] = np.inf
        return np.concatenate([all_kept[None], split])

    def choose(self, first: int, last: int, room: int) -> tuple[int, int, int]:
        choice = int(self.choice[first, last, room])
        if choice == _ALL:
            return _ALL, room - int(self.saved[first]), 0
        return choice, room - int(self.sizes[first + choice]), room
