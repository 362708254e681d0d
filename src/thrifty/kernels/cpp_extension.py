"""C++ kernels: compiled at first use, and run on as many threads as torch uses.

Each process compiles the code in some seconds and leaves no file on the disk. No process loads a library that another
process compiled. Without a compiler, torch's operations are used instead.
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
"""Compiler option that not every compiler supports. Without it, each vector operation is split in two halves."""
PARTS = 4
"""Number of parts per thread. With many parts, a slow thread delays the other threads less."""
_building = Lock()


class NativeLibrary:
    """Compiled library of `extern "C"` functions. Each function processes a range, and may run in several threads."""

    def __init__(self, source: str, *options: str):
        self.source, self.options = source, (*OPTIONS, *options)

    def is_there(self) -> bool:
        return self._loaded is not None

    def run(self, name: str, arguments: Sequence[Tensor | int | None], count: int, fewest: int = 1) -> None:
        """Run a function over the range [0, count), split into parts of at least `fewest` for several threads. The
        function receives the arguments, the first index of its part, and the index after the last. Tensors must be
        contiguous.
        """
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
    """Run `work` on parts of the range [0, count). This thread and others take parts from one queue."""
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
    finally:  # if this thread is interrupted, it must not free memory that other threads still write to
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
