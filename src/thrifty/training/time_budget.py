"""Budget in seconds: the number of steps is estimated again while a run trains.

The estimates include start-up, compilation and changes of the machine's speed. Each new estimate is a record of the
run. A resumed run repeats the recorded estimates (`TrainSession.recorded`), so that it equals the uninterrupted run.
"""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from thrifty.composition.compose import Run
from thrifty.core.recipe import Budget
from thrifty.training.loop import Record
from thrifty.training.rank_sync import process_group_sync

EARLY, AIM, LATE = 0.965, 0.985, 1.0
"""Fractions of the budget. A run whose predicted end is before `EARLY` or after `LATE` gets a new number of steps, with
a predicted end at `AIM`."""
CHECKS = 40
"""Number of evenly spaced checks in a run. The last steps of a run are checked more often."""
WINDOW = 0.1
"""Fraction of the budget over which step times are averaged."""
LEAST_STEPS = 3
"""Minimum number of step times for an estimate."""
SLOW_STEPS = 2
"""Number of steps after a start or a structural change that are not averaged, because compilation slows them."""
FINAL_FROM = 0.8
"""Fraction of a run after which its structure and batches are assumed to be final."""
AROUND = 5
"""Length in steps of the running median. Each step time is compared with this median."""
ONCE = 2
"""Number of slow steps whose additional time is ignored, such as compilation at the start and after an interruption.
Events that occur more often count as cost, such as an update of a preconditioner at every tenth step.
"""


def steady(seconds: Sequence[float], rare: int = ONCE) -> list[float]:
    """Return the step times with rare slow steps shortened. Excesses over the running median are clipped to the
    (`rare` + 1)-th largest excess.
    """
    if not len(seconds):
        return []
    times = np.asarray(seconds, dtype=float)
    around = sliding_window_view(np.pad(times, AROUND // 2, constant_values=np.nan), AROUND)
    usual = np.nanmedian(around, axis=1)
    above = np.sort(times - usual)[::-1]
    most = max(0.0, above[rare]) if len(above) > rare else 0.0
    return np.minimum(times, usual + most).tolist()


class RunLength(NamedTuple):
    """Number of steps of a run, `steps`, as estimated when `step` steps were finished."""

    step: int
    steps: int


@dataclass
class TimeBudget:
    """The used time of a run, and estimates of the run's number of steps."""

    budget: Budget
    began: float
    """Time of the start, in seconds of time.monotonic()."""
    used_before: float = 0.0
    """Used seconds of earlier processes of a resumed run."""
    final_step: float = 0.0
    """Seconds of a step in the final structure, measured before the run; 0 if all steps are equal."""
    recorded_until: int = 0
    """Last step of the interrupted run. No new estimate is made before this step."""
    step_times: list[float] = field(default_factory=list)
    """Seconds of all steps so far, if only training steps count."""
    starts: int = 1
    """Number of processes of the run so far. Each has slow first steps."""
    _recent: deque[float] = field(default_factory=deque)
    """Seconds of recent steps."""
    _work: dict[str, float] = field(default_factory=dict)
    """Least seconds of each kind of work between steps, such as an evaluation; the first one may be slow."""
    _between: float = 0.0
    """Seconds of work between the last two steps."""
    _slow_steps: int = SLOW_STEPS
    _latest: float = 0.0
    """Seconds of the last step, which may be slow."""
    _next_check: int = 0
    _last_step: float = field(default_factory=time.monotonic)
    _ignored: float = 0.0
    """Additional seconds of rare slow steps (`steady`), known at the last check."""

    def __post_init__(self) -> None:
        self._ignored = self._excess()

    def _excess(self) -> float:
        """Return the additional seconds of rare slow steps so far."""
        return sum(self.step_times) - sum(steady(self.step_times, ONCE * self.starts))

    @property
    def seconds(self) -> float:
        assert self.budget.seconds is not None
        return self.budget.seconds

    def used(self, training: float) -> float:
        """Return the used seconds of the budget. `training` is the number of seconds in training steps. If only
        training steps count, rare slow steps are shortened (`steady`)."""
        if self.budget.counts == "training":
            return training - self._ignored
        return self.used_before + time.monotonic() - self.began

    @contextmanager
    def work(self, kind: str) -> Iterator[None]:
        """Measure the time of work between steps, which is done inside the context."""
        start = time.monotonic()
        yield
        seconds = time.monotonic() - start
        self._work[kind] = min(seconds, self._work.get(kind, math.inf))
        self._between += seconds

    def observe(self, seconds: float, is_changed: bool) -> None:
        """Add the seconds of one training step. `is_changed` is True after a structural change."""
        now = time.monotonic()
        if self.budget.counts == "run":  # includes records and the progress display
            seconds = max(now - self._last_step - self._between, seconds)
        else:
            self.step_times.append(seconds)
        self._last_step, self._between, self._latest = now, 0.0, seconds
        if is_changed:
            self._slow_steps = SLOW_STEPS
            self._recent.clear()
        if self._slow_steps:
            self._slow_steps -= 1
            return
        self._recent.append(seconds)
        while len(self._recent) > LEAST_STEPS and sum(self._recent) - self._recent[0] > WINDOW * self.seconds:
            self._recent.popleft()

    def changed_steps(
        self, run: Run, record: Record, counters: Mapping[str, float], every: Mapping[str, int]
    ) -> int | None:
        """Return the new number of steps after a record; None if the number stays the same.

        `every` maps kinds of work to the number of steps between them.
        """
        self.observe(record.seconds, bool(record.changes))
        if record.step == run.steps:
            return None
        if not self.is_due(record.step, run.steps):
            return None
        steps = process_group_sync().run_first(
            lambda: self.estimate(record.step, run.steps, counters["seconds"], every)
        )
        return steps if steps != run.steps else None

    def is_due(self, step: int, steps: int) -> bool:
        """Return True if the number of steps is to be checked after `step` finished steps; the same on all ranks."""
        if step < self._next_check or step <= self.recorded_until:
            return False
        self._next_check = step + max(1, min(steps // CHECKS, (steps - step) // 4))
        return True

    def estimate(self, step: int, steps: int, training: float, every: Mapping[str, int]) -> int:
        """Return the number of steps that fits the budget, or `steps` if its predicted end is in range.

        After the last step, one piece of work of each kind is still to be done, such as an evaluation. At least one
        step is left.
        """
        is_whole_run = self.budget.counts == "run"
        self._ignored = self._excess()
        used, work = self.used(training), self._work if is_whole_run else {}
        last = sum(work.values())
        if len(self._recent) < LEAST_STEPS:
            if not is_whole_run:
                return steps
            if used + last >= LATE * self.seconds:
                return step + 1
            # a slow step is an upper bound: steps that fit by it are added, and none are taken away
            return max(steps, step + math.floor((AIM * self.seconds - used - last) / self._latest))
        seconds = fmean(self._recent)
        if step < FINAL_FROM * steps:
            seconds = max(seconds, self.final_step)
        seconds += sum(work[kind] / interval for kind, interval in every.items() if kind in work)
        if EARLY * self.seconds <= used + (steps - step) * seconds + last <= LATE * self.seconds:
            return steps
        return step + max(1, math.floor((AIM * self.seconds - used - last) / seconds))
