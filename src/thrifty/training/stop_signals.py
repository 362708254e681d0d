"""Stop requests: the run finishes the step, saves and exits. SIGTERM and SIGINT are stop requests with their usual exit
codes. A second signal ends the process at once; in Python, a second Ctrl-C ends only the run, because the process may
be a notebook."""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from thrifty.core.errors import TYPED
from thrifty.core.ranks import ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ASKED = 1
"""Value in place of a signal number for a stop request by the program itself."""


class StopRequest:
    """Handler of stop signals, which records the first signal. `code` is the resulting exit code. `say` receives a line
    at the first signal, because the step that must end may take long."""

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self.signal = 0
        self._say = say
        self._before: dict[int, Any] = {}
        self._is_over = False

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread of a process may set signal handlers
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over = True
        for number in self._before:
            if signal.getsignal(number) == self._remember:  # runs of `thrifty.steps` may end in any order
                signal.signal(number, self._handler_before(number))

    def _handler_before(self, number: int) -> Any:
        """Return the handler before this run and before earlier runs that are over."""
        handler = self._before[number]
        run = getattr(handler, "__self__", None)
        return run._handler_before(number) if isinstance(run, StopRequest) and run._is_over else handler

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal > ASKED:
            if number == signal.SIGINT and TYPED not in os.environ and ranks() == 1:
                self.__exit__()
                raise KeyboardInterrupt
            os._exit(128 + number)
        self.signal = number
        again = "; Ctrl-C again ends at once, without saving" if number == signal.SIGINT else ""
        with suppress(RuntimeError):  # the signal interrupted another line
            self._say(f"stopping after this step, then saving{again}")

    def ask(self) -> None:
        """Request a stop without a signal."""
        self.signal = self.signal or ASKED

    @property
    def code(self) -> int:
        return 0 if self.signal in (0, ASKED) else 128 + self.signal

    @property
    def reason(self) -> str:
        return "as requested" if self.signal == ASKED else f"by signal {self.signal}"

    def agreed(self) -> bool:
        """Return True if any rank received a stop request. This is a collective: all ranks must call it and receive the
        same result."""
        if ranks() == 1:
            return bool(self.signal)
        signals = torch.tensor(self.signal, device="cuda" if str(dist.get_backend()) == "nccl" else "cpu")
        dist.all_reduce(signals, dist.ReduceOp.MAX)
        if signals:  # a signal that arrives during the reduction is handled in the next step
            self.signal = int(signals)
        return bool(signals)
