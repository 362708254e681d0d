"""The start time of a process distinguishes processes with the same pid, and does not depend on the clock."""

import os
import subprocess
import sys

import psutil
import pytest

from thrifty.machine.process_start import is_running, process_start


def test_process_is_running_until_it_has_ended() -> None:
    start = process_start(os.getpid())
    assert start is not None and is_running(os.getpid(), start) and not is_running(os.getpid(), start - 1)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    born = process_start(child.pid)
    assert born is not None and born >= start and is_running(child.pid, born)
    child.kill()
    child.stdin.close()  # type: ignore[union-attr]
    while process_start(child.pid) is not None:  # the process has ended, but was not waited for
        pass
    assert not is_running(child.pid, born)
    child.wait()


@pytest.mark.parametrize("pid", [2**22 + 1, 2**40, -1])
def test_impossible_pid_has_no_start_time(pid: int) -> None:
    assert process_start(pid) is None


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="there is no /proc")
def test_clock_change_does_not_affect_the_start_time(monkeypatch: pytest.MonkeyPatch) -> None:
    start = process_start(os.getpid())
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: 0.0)
    monkeypatch.setattr(psutil, "boot_time", lambda: 1e9)
    assert process_start(os.getpid()) == start
