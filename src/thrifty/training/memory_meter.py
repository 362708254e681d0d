"""Memory use since the meter was created, and the policy for freed memory.

Printed memory is always the same quantity, predicted and measured: tensors on a GPU, the resident process on a CPU. The
process is its size before the model is built (`MemoryMeter.process`) plus tensors. Bytes of tensors alone are printed
as "tensors".
"""

import ctypes
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil
import torch

from thrifty.composition.compose import Run
from thrifty.core.out_of_memory import process_peak
from thrifty.core.stages import Stage
from thrifty.core.technique import Technique

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt(3): minimum sizes of free memory that is returned to the kernel."""
_KEEPING = {_MMAP_THRESHOLD: 2**26, _TRIM_THRESHOLD: 2**31 - 1}
"""Limits that return only blocks of more than 64 MiB to the kernel, because larger blocks would fragment the heap."""
_GIVING_BACK = {_MMAP_THRESHOLD: 2**20, _TRIM_THRESHOLD: 2**20}
_BEFORE = {_MMAP_THRESHOLD: 32 * 2**20, _TRIM_THRESHOLD: 64 * 2**20}
"""Typical final values of glibc's adaptive limits in a program that frees large blocks. Limits that a program has set
no longer adapt.
"""


WORKSPACE, FRAGMENTS = 60e6, 0.4
"""Largest bytes of kernels' workspaces, and freed bytes that a process keeps, relative to its activations."""


def set_freed_memory_policy(run: Run) -> AbstractContextManager[None]:
    """Return a context manager that sets the policy for memory that the steps of this run free. If a technique promises
    a memory limit, freed memory is returned to the kernel at once. Otherwise the process keeps freed memory for the
    next step."""
    promised = any(technique.limits_activation_bytes for technique in run.techniques)
    return return_freed_memory(run.device) if promised else keep_freed_memory(run.device)


def keep_freed_memory(device: torch.device) -> AbstractContextManager[None]:
    """Keep freed CPU memory in pieces of up to 64 MiB for the next step. The memory is released at the end of the
    context.

    By default the C library returns large pieces to the kernel at once, and the kernel clears each page again in the
    next step (benchmarks/bench_freed_memory.py). There is no effect if the C library is not glibc, or if environment
    variables configure its allocator.
    """
    return _limited(device, _KEEPING)


def return_freed_memory(device: torch.device) -> AbstractContextManager[None]:
    """Return freed blocks of 1 MiB or more to the kernel at once, so that the process holds only its tensors. The
    default limit of the C library is 32 times larger. Returning blocks costs time, see `keep_freed_memory`."""
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
    configured = "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ)
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" and not configured else None


def kept_bytes(device: torch.device, techniques: Sequence[Technique], activations: float) -> float:
    """Return the expected bytes that a run with these techniques holds on a CPU in addition to its tensors at the peak.

    These are workspaces of kernels, and freed blocks that the process keeps for the next step. Without compiled blocks,
    the freed blocks grow with the activations. The constants are from runs of eight models with torch 2.13; the
    largest error was 9 % of a process, and 14 % for other models.
    """
    if device.type != "cpu" or _glibc() is None:
        return 0.0
    is_kept = not any(technique.limits_activation_bytes for technique in techniques)
    is_compiled = any(technique.stage is Stage.COMPILE for technique in techniques)
    return min(WORKSPACE, activations) + (FRAGMENTS * activations if is_kept and not is_compiled else 0.0)


class MemoryMeter:
    """Current and peak bytes above the level at creation: allocated bytes on a GPU, resident bytes on a CPU.

    File pages mapped since creation are not counted, because the system can drop them. `process` is the resident memory
    of a CPU process at creation, without freed memory. On Linux the kernel records the peak, and the meter resets it at
    creation. On other systems, and on a GPU of an Apple chip, the peak is the largest value that was queried.
    """

    def __init__(self, device: torch.device):
        self.device, self._largest = device, 0.0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            if libc := _glibc():
                libc.malloc_trim(0)  # memory that was freed after counting a run on fake tensors
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
        if self.device.type == "mps":  # torch records no peak
            return self._largest
        return max(process_peak() - self._dropped() - self._before, now, self._largest)

    def _dropped(self) -> int:
        """Return the bytes of file pages mapped since creation, which the system can drop."""
        return max(_mapped_bytes() - self._mapped, 0)

    def _absolute(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        if self.device.type == "mps":
            return torch.mps.current_allocated_memory()
        return psutil.Process().memory_info().rss - self._dropped()


def _mapped_bytes() -> int:
    """Return the bytes of this process's resident pages that belong to files; 0 if the kernel does not report them."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("RssFile:")).split()[1])
    return 0
