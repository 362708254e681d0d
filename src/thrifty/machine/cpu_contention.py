"""How much of this machine's processors other programs take meanwhile."""

import os
import time
from contextlib import suppress

import psutil

from thrifty.core.ranks import ranks
from thrifty.machine.cpu_features import usable_cores

LEAST = 0.3
"""Seconds below which the ticks of the system's clocks say nothing."""


class CpuContention:
    """Counts from when it is made: what all programs worked on the processors that this process may use, less what it
    and those that it started did; of several ranks, less what the process did that started them, and all of its."""

    def __init__(self) -> None:
        self.cores = usable_cores()
        self.head = os.getppid() if ranks() > 1 else os.getpid()
        self.began, self.all, self.own = time.perf_counter(), _all_work(self.cores), _own_work(self.head)

    def taken(self) -> float:
        """Cores that others kept busy since then; 0 where that was too short a while to tell."""
        seconds = time.perf_counter() - self.began
        if seconds < LEAST:
            return 0.0
        others = (_all_work(self.cores) - self.all) - (_own_work(self.head) - self.own)
        return min(max(others / seconds, 0.0), float(len(self.cores)))


def _all_work(cores: list[int]) -> float:
    """Seconds of work on these processors since the machine was started; what a host took away counts as well."""
    times = psutil.cpu_times(percpu=True)
    kinds = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(getattr(times[core], kind, 0.0) for core in cores if core < len(times) for kind in kinds)


def _own_work(head: int) -> float:
    first = psutil.Process(head)
    return sum(map(_of, (first, *first.children(recursive=True))))


def _of(process: psutil.Process) -> float:
    """Its own seconds and those of its children that have ended."""
    with suppress(psutil.Error):  # it ended meanwhile
        spent = process.cpu_times()
        return spent.user + spent.system + spent.children_user + spent.children_system
    return 0.0
