"""Stall detection: time without progress of this rank, and time without heartbeats of other ranks.

The watching thread counts time in ticks of at most `LONGEST_TICK`. If this process was stopped or the machine slept,
that time therefore does not count as silence of other ranks.
"""

import time
from collections import deque

from thrifty.training.stack_state import ThreadState

LONGEST_TICK = 2.0
"""Maximum seconds per tick."""
SLACK = 10
"""Maximum duration of a step, as a multiple of the longest recent step."""
FLOOR = 45.0
"""Seconds below which a step never counts as hanging."""
GRACE = 3.0
"""Seconds after the limit in which a waiting rank still expects that another rank names the cause."""
KNOWN = 3
"""Number of steps after which the step duration is known."""


class TickTimer:
    """Timer of the seconds since the last call of `next`, limited to `LONGEST_TICK`."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def next(self) -> float:
        before, self._last = self._last, time.monotonic()
        return min(self._last - before, LONGEST_TICK)


class StallTimer:
    """Timer of the seconds since a value last changed."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: object = None

    def update(self, value: object, tick: float) -> float:
        self.seconds = self.seconds + tick if value == self._last else 0.0
        self._last = value
        return self.seconds


class ProgressWatchdog:
    """The progress of this rank. The training thread calls `at`; the watching thread calls the other methods."""

    def __init__(self, hang: float):
        self.hang = hang
        """Seconds without progress after which a rank counts as hanging; no limit during the start."""
        self.doing, self.starting = "the start", True
        self.still = 0.0
        """Seconds since the last progress."""
        self.busy = 0.0
        """Seconds since the last progress, counting only time in a step without waiting."""
        self._marks = self._seen = 0
        self._in_step, self._began = False, 0.0
        self._steps: deque[float] = deque(maxlen=20)

    def at(self, doing: str, *, step: bool = False) -> None:
        """Record that an activity begins; `step` marks repeated activities of equal length."""
        now = time.monotonic()
        if self._in_step:
            self._steps.append(now - self._began)
        self.doing, self.starting, self._in_step, self._began = doing, False, step, now
        self._marks += 1

    def update(self, thread: ThreadState, tick: float) -> None:
        if self._seen != self._marks:
            self._seen, self.still, self.busy = self._marks, 0.0, 0.0
            return
        self.still += tick
        if self._in_step and not (thread.waits or thread.long):
            self.busy += tick

    @property
    def hangs(self) -> bool:
        """True if this rank itself blocks the run."""
        known = len(self._steps) >= KNOWN
        longest = min(max(FLOOR, SLACK * max(self._steps, default=0.0)), self.hang) if known else self.hang
        return self.busy > longest

    @property
    def is_stuck(self) -> bool:
        """True if there is no progress for so long that this rank, or a rank that it waits for, must hang."""
        return not self.starting and self.still > self.hang + GRACE
