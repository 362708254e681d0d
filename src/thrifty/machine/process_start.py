"""Start time of a process, which distinguishes it from a later process with the same pid."""

import os
from pathlib import Path

import psutil

TOLERANCE = 0.5
"""Maximum difference in seconds between two readings of one start time."""


def process_start(pid: int) -> float | None:
    """Return the start time in seconds; None if the process does not exist or is a zombie. With /proc, seconds count
    from boot, so that clock changes have no effect. Without /proc, psutil's value depends on the clock."""
    try:
        if Path("/proc/self/stat").exists():
            stat = Path(f"/proc/{int(pid)}/stat").read_text()
            state, *fields = stat.rpartition(")")[2].split()  # the name may contain spaces and brackets
            return None if state == "Z" else int(fields[18]) / os.sysconf("SC_CLK_TCK")
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except (OSError, psutil.Error, ValueError, OverflowError):  # also for an impossible pid
        return None


def is_running(pid: int, start: float) -> bool:
    """Return True if the process with this pid and start time exists."""
    now = process_start(pid)
    return now is not None and abs(now - start) < TOLERANCE
