"""How much memory this process takes, above what it took before the model was built."""

import re
from pathlib import Path

import psutil
import torch


class MemoryMeter:
    """Bytes now and at the peak since it was made: of the device on a GPU, resident ones on a CPU.

    On Linux the kernel keeps the peak itself and lets a process reset its own; elsewhere the peak is the largest
    value that was asked for.
    """

    def __init__(self, device: torch.device):
        self.device, self._largest = device, 0.0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif Path("/proc/self/clear_refs").exists():
            Path("/proc/self/clear_refs").write_text("5")
        self._before = self._absolute()

    def now(self) -> float:
        value = self._absolute() - self._before
        self._largest = max(self._largest, value)
        return value

    def peak(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self._before
        if Path("/proc/self/status").exists():
            found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
            return int(found[1]) * 1024 - self._before if found else self.now()
        return max(self._largest, self.now())

    def _absolute(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return psutil.Process().memory_info().rss
