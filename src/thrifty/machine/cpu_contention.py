"""CPU time that other programs use during a measurement."""

import os
import time
from contextlib import suppress

import psutil

from thrifty.core.ranks import ranks
from thrifty.machine.cpu_features import usable_cores

LEAST = 0.3
"""Minimum seconds of a measurement. In shorter measurements, the ticks of the system's clocks are too coarse."""


class CpuContention:
    """Counter of the CPU time that other programs use on the cores of this process, since the counter was created. CPU
    time of this process and its children is excluded. On several ranks, the launcher and all its children are excluded
    too."""

    def __init__(self) -> None:
        self.cores = usable_cores()
        self.head = os.getppid() if ranks() > 1 else os.getpid()
        self.began, self.all, self.own = time.perf_counter(), _all_work(self.cores), _own_work(self.head)

    def taken(self) -> float:
        """Return the mean number of cores that other programs kept busy; 0 if the measurement is too short."""
        seconds = time.perf_counter() - self.began
        if seconds < LEAST:
            return 0.0
        others = (_all_work(self.cores) - self.all) - (_own_work(self.head) - self.own)
        return min(max(others / seconds, 0.0), float(len(self.cores)))


def _all_work(cores: list[int]) -> float:
    """Return the seconds of work on these cores since boot, including time that the host of a virtual machine used."""
    times = psutil.cpu_times(percpu=True)
    kinds = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(getattr(times[core], kind, 0.0) for core in cores if core < len(times) for kind in kinds)


def _own_work(head: int) -> float:
    first = psutil.Process(head)
    return sum(map(_of, (first, *first.children(recursive=True))))


def _of(process: psutil.Process) -> float:
    """Return the CPU seconds of a process and of its ended children."""
    with suppress(psutil.Error):  # the process may have ended
        spent = process.cpu_times()
        return spent.user + spent.system + spent.children_user + spent.children_system
    return 0.0
