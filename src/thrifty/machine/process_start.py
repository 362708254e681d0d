"""Start time of a process, which distinguishes it from a later one with the same number."""

import os
from pathlib import Path

import psutil

TOLERANCE = 0.5
"""Seconds by which two readings may differ."""


def process_start(pid: int) -> float | None:
    """Seconds; None where there is no such process, or only what is left of an ended one.

    Where there is /proc they are counted from when the machine was started, so that no change of its clock moves them:
    psutil's are of the clock, and follow each of its steps.
    """
    try:
        if Path("/proc/self/stat").exists():
            stat = Path(f"/proc/{int(pid)}/stat").read_text()
            state, *fields = stat.rpartition(")")[2].split()  # a name may hold spaces and brackets
            return None if state == "Z" else int(fields[18]) / os.sysconf("SC_CLK_TCK")
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except (OSError, psutil.Error, ValueError, OverflowError):  # as for a number that no process can have
        return None


def is_running(pid: int, start: float) -> bool:
    """Return True if the process with this number and start time exists."""
    now = process_start(pid)
    return now is not None and abs(now - start) < TOLERANCE
