"""How long a rank has made no progress, and how long another has been silent.

Time is counted in the ticks of the thread that watches, none counted longer than `LONGEST_TICK`: a process that was
itself stopped, or a machine that slept, does not take that time for the silence of others.
"""

import time
from collections import deque

from thrifty.training.stack_state import ThreadState

LONGEST_TICK = 2.0
"""Seconds."""
SLACK = 10
"""A step may take so many times as long as the longest of the last ones …"""
FLOOR = 45.0
"""… and so many seconds in any case."""
KNOWN = 3
"""Steps after which their duration is known."""


class TickTimer:
    """Seconds between two looks, as they are counted."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def next(self) -> float:
        before, self._last = self._last, time.monotonic()
        return min(self._last - before, LONGEST_TICK)


class StallTimer:
    """Seconds for which something has stayed the same."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: object = None

    def update(self, value: object, tick: float) -> float:
        self.seconds = self.seconds + tick if value == self._last else 0.0
        self._last = value
        return self.seconds


class ProgressWatchdog:
    """A rank's own progress. `at` is called by the thread that trains, the rest by the one that watches it."""

    def __init__(self, hang: float):
        self.hang = hang
        """Seconds without progress, whatever a rank does, after which it hangs; while it starts there is no limit."""
        self.doing, self.starting = "the start", True
        self.still = 0.0
        """Seconds since the last progress."""
        self.busy = 0.0
        """Of these, the seconds in which it was seen at work in a step, waiting for nobody."""
        self._marks = self._seen = 0
        self._in_step, self._began = False, 0.0
        self._steps: deque[float] = deque(maxlen=20)

    def at(self, doing: str, *, step: bool = False) -> None:
        """A new thing is begun; `step` says whether it is one of the many steps that take alike."""
        now = time.monotonic()
        if self._in_step:
            self._steps.append(now - self._began)
        self.doing, self.starting, self._in_step, self._began = doing, False, step, now
        self._marks += 1

    def update(self, standing: ThreadState, tick: float) -> None:
        if self._seen != self._marks:
            self._seen, self.still, self.busy = self._marks, 0.0, 0.0
            return
        self.still += tick
        if self._in_step and not (standing.waits or standing.long):
            self.busy += tick

    @property
    def hangs(self) -> bool:
        """Whether this rank itself holds up the run."""
        known = len(self._steps) >= KNOWN
        longest = min(max(FLOOR, SLACK * max(self._steps, default=0.0)), self.hang) if known else self.hang
        return self.busy > longest

    @property
    def is_stuck(self) -> bool:
        """Whether nothing has moved for so long that some rank must hang, this one or another that it waits for."""
        return not self.starting and self.still > self.hang
