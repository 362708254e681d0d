"""Requests to stop: finish the step, save, leave. SIGTERM and SIGINT do so with the usual code, at once if repeated."""

import os
import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from thrifty.core.ranks import ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ASKED = 1
"""Stands for a request by the program itself, in place of a signal's number."""


class StopRequest:
    """While open, remembers the first signal instead of dying of it; `code` is the exit code it stands for."""

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread of a process may receive signals
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal > ASKED:
            os._exit(128 + number)
        self.signal = number

    def ask(self) -> None:
        """Request a stop without a signal."""
        self.signal = self.signal or ASKED

    @property
    def code(self) -> int:
        return 0 if self.signal in (0, ASKED) else 128 + self.signal

    @property
    def reason(self) -> str:
        return "as asked" if self.signal == ASKED else f"by signal {self.signal}"

    def agreed(self) -> bool:
        """Whether any rank was asked to stop; all ranks must ask together, and all get the same answer."""
        if ranks() == 1:
            return bool(self.signal)
        asked = torch.tensor(self.signal, device="cuda" if str(dist.get_backend()) == "nccl" else "cpu")
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        if asked:  # a signal that came while the ranks talked stays for the next step
            self.signal = int(asked)
        return bool(asked)
