"""C++ of this toolkit: compiled when first wanted, and run on as many threads as torch has.

The code is compiled anew in each process, which takes some seconds, and nothing is left on the disk: no process ever
loads a library that another has put there. Without a compiler there is no library, and torch's operations do the work.
"""

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from thrifty.machine.cpu_features import cpp_compiler

OPTIONS = ("-std=c++17", "-O3", "-march=native", "-w", "-shared", "-fPIC")
WIDE = "-mprefer-vector-width=512"
"""Not every compiler knows it; the vectors are as wide without, but in two halves."""
PARTS = 4
"""For each thread, so that one that is held up does not hold up all."""
_building = Lock()


class NativeLibrary:
    """Functions `extern "C"` of a source, each of which works on a range and may be called from several threads."""

    def __init__(self, source: str, *options: str):
        self.source, self.options = source, (*OPTIONS, *options)

    def is_there(self) -> bool:
        return self._loaded is not None

    def run(self, name: str, arguments: Sequence[Tensor | int | None], count: int, fewest: int = 1) -> None:
        """A function over [0, count), parts of which go to threads, each of `fewest` or more: it takes the arguments,
        and behind them the first number of a part and the one after its last. Tensors must be contiguous."""
        function = getattr(self._loaded, name)
        passed = [_passed(argument) for argument in arguments]

        def work(first: int, last: int) -> None:
            function(*passed, ctypes.c_int64(first), ctypes.c_int64(last))

        in_parts(work, count, fewest)

    @property
    def _loaded(self) -> ctypes.CDLL | None:
        with _building:
            return self._built

    @cached_property
    def _built(self) -> ctypes.CDLL | None:
        compiler = cpp_compiler()
        if compiler is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder, "source.cpp"), Path(folder, "library.so")
            source.write_text(self.source)
            for options in ((*self.options, WIDE), self.options):
                done = subprocess.run([compiler, *options, str(source), "-o", str(target)], capture_output=True)
                if done.returncode == 0:
                    return ctypes.CDLL(str(target))
        return None


def in_parts(work: Callable[[int, int], None], count: int, fewest: int = 1) -> None:
    """The range [0, count) in parts, which this thread and others take from one queue."""
    threads = torch.get_num_threads()
    parts = max(min(count // fewest, PARTS * threads), 1) if threads > 1 else 1
    queue = iter(pairwise([count * part // parts for part in range(parts + 1)]))

    def take() -> None:
        for part in queue:
            work(*part)

    others = min(threads, parts) - 1
    taking = [_pool(threads - 1, os.getpid()).submit(take) for _ in range(others)]
    try:
        take()
    finally:  # whoever is interrupted must not free what others still write to
        for one in taking:
            one.result()


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "thrifty-native")


def _passed(argument: Tensor | int | None) -> ctypes.c_void_p | ctypes.c_int64:
    if isinstance(argument, int):
        return ctypes.c_int64(argument)
    assert argument is None or argument.is_contiguous()
    return ctypes.c_void_p(None if argument is None else argument.data_ptr())
