"""Measured rates of this machine: matrix products, memory bandwidth, disk writes.

Other programs use the machine too, so a rate is a median with its spread, not a single timing.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch


@dataclass(frozen=True)
class MeasuredRate:
    """Work per second over several repeats: FLOP/s or bytes/s."""

    median: float
    low: float
    high: float
    repeats: int


LEAST_REPEATS = 3
"""Minimum number of timed repeats, even beyond the time limit."""


def matmul_rate(device: torch.device | str, dtype: torch.dtype, seconds: float) -> MeasuredRate:
    """Return the FLOP/s of the fastest of several square matmuls. Sizes that would exceed `seconds` are skipped."""
    device = torch.device(device)
    sizes = (512, 1024, 2048) if device.type == "cpu" else (2048, 4096, 8192)
    best: MeasuredRate | None = None
    for size in sizes:
        work = 2 * size**3
        if best is not None and (1 + LEAST_REPEATS) * work / best.high > seconds:
            break
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        rate = _repeated(lambda a=a, b=b: a @ b, work, seconds / len(sizes), device)
        best = rate if best is None or rate.median > best.median else best
    assert best is not None
    return best


def memory_rate(seconds: float) -> MeasuredRate:
    """Return the bytes/s read and written by a copy in main memory. The copy is larger than the last-level cache."""
    count = min(max(4 * _last_cache(), 64 << 20), 512 << 20)
    source, target = torch.ones(count, dtype=torch.uint8), torch.zeros(count, dtype=torch.uint8)
    return _repeated(lambda: target.copy_(source), 2 * count, seconds, torch.device("cpu"))


def disk_rate(folder: Path, size: int = 32 << 20, repeats: int = 3) -> MeasuredRate | None:
    """Return the bytes/s written and flushed to a file in `folder`. Return None without space or permission. Each
    repeat writes `size` bytes. The file is deleted."""
    block = os.urandom(1 << 20)
    times = []
    try:
        if shutil.disk_usage(folder).free < 10 * size:
            return None
        for _ in range(repeats):
            with tempfile.TemporaryFile(dir=folder) as file:
                start = time.perf_counter()
                for _ in range(size >> 20):
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
                times.append(time.perf_counter() - start)
    except OSError:
        return None
    return _rate(size, times)


def _repeated(function: Callable[[], object], work: float, seconds: float, device: torch.device) -> MeasuredRate:
    """Time `function` until `seconds` are used, but at least `LEAST_REPEATS` times, after one warm-up call."""
    _timed(function, device)
    times: list[float] = []
    while len(times) < LEAST_REPEATS or sum(times) < seconds:
        times.append(_timed(function, device))
    return _rate(work, times)


def _timed(function: Callable[[], object], device: torch.device) -> float:
    if device.type in ("cuda", "mps"):
        torch.accelerator.synchronize(device)
    start = time.perf_counter()
    function()
    if device.type in ("cuda", "mps"):
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def _rate(work: float, times: list[float]) -> MeasuredRate:
    return MeasuredRate(work / median(times), work / max(times), work / min(times), len(times))


def _last_cache() -> int:
    """Return the bytes of the last-level cache; 32 MiB if the system does not report them."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text.removesuffix("K")) << 10
    except (OSError, ValueError):
        return 32 << 20
