"""How much memory this process takes, above what it took before the model was built, and where freed memory goes."""

import ctypes
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil
import torch

from thrifty.composition.compose import Run
from thrifty.core.out_of_memory import process_peak

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""What mallopt(3) of glibc calls the sizes from which free memory goes back to the kernel."""
_KEEPING = {_MMAP_THRESHOLD: 2**26, _TRIM_THRESHOLD: 2**31 - 1}
"""Freed blocks of hundreds of megabytes, between which others would find no room, go back."""
_GIVING_BACK = {_MMAP_THRESHOLD: 2**20, _TRIM_THRESHOLD: 2**20}
_BEFORE = {_MMAP_THRESHOLD: 32 * 2**20, _TRIM_THRESHOLD: 64 * 2**20}
"""Where glibc's own limits, which move, end up in a program that frees large blocks. Once set they move no more."""


def set_freed_memory_policy(run: Run) -> AbstractContextManager[None]:
    """Where memory goes that steps of this run free: back at once where a technique promises bytes, which pieces of
    free memory between others would exceed; else it stays."""
    promised = any(technique.limits_activation_bytes for technique in run.techniques)
    return return_freed_memory(run.device) if promised else keep_freed_memory(run.device)


def keep_freed_memory(device: torch.device) -> AbstractContextManager[None]:
    """Memory that a step on a processor frees stays with the process, for the next step, in blocks of up to 64 MiB; at
    the end it is given back.

    By default the C library gives large blocks back to the kernel at once, which clears each of their pages when the
    next step asks for as much (benchmarks/bench_freed_memory.py). Does nothing where the C library is not glibc, or
    the environment has settings for it.
    """
    return _limited(device, _KEEPING)


def return_freed_memory(device: torch.device) -> AbstractContextManager[None]:
    """What a step on a processor frees goes back at once from a mebibyte on, so that the process holds what its tensors
    do; the C library's own limit is 32 times that. It costs time, see `keep_freed_memory`."""
    return _limited(device, _GIVING_BACK)


@contextmanager
def _limited(device: torch.device, limits: Mapping[int, int]) -> Iterator[None]:
    libc = _glibc() if device.type == "cpu" else None
    if libc is None or not all(libc.mallopt(limit, value) for limit, value in limits.items()):
        yield
        return
    try:
        yield
    finally:
        for limit, value in _BEFORE.items():
            libc.mallopt(limit, value)
        libc.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    told = "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ)
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" and not told else None


class MemoryMeter:
    """Bytes now and at the peak since it was made: of the device on a GPU, resident ones on a CPU, without pages of
    files that were mapped since, which the system drops when others need the room. `process` are those that a process
    on a CPU held before; what it can do without is given back then.

    On Linux the kernel keeps the peak itself and lets a process reset its own; elsewhere the peak is the largest
    value that was asked for.
    """

    def __init__(self, device: torch.device):
        self.device, self._largest = device, 0.0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            if libc := _glibc():
                libc.malloc_trim(0)  # of what counting a run on fake tensors leaves behind
            if Path("/proc/self/clear_refs").exists():
                Path("/proc/self/clear_refs").write_text("5")
        self._mapped = _mapped_bytes()
        self._before = self._absolute()

    @property
    def process(self) -> float:
        return self._before if self.device.type == "cpu" else 0.0

    def now(self) -> float:
        value = self._absolute() - self._before
        self._largest = max(self._largest, value)
        return value

    def peak(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self._before
        now = self.now()
        return max(process_peak() - self._dropped() - self._before, now, self._largest)

    def _dropped(self) -> int:
        """Bytes that the system can drop: pages of files, more than when the meter was made."""
        return max(_mapped_bytes() - self._mapped, 0)

    def _absolute(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return psutil.Process().memory_info().rss - self._dropped()


def _mapped_bytes() -> int:
    """Bytes of this process's resident pages that lie in files; 0 where the kernel does not tell."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("RssFile:")).split()[1])
    return 0
