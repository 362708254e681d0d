"""The compiled products: built when first wanted, and run on as many threads as torch has.

The code is compiled anew in each process, which takes about a second, and nothing is left on the disk: no process ever
loads a library that another has put there. Without a compiler there is no library, and torch's operations do the work.
"""

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from thrifty.core.machine import cpp_compiler
from thrifty.kernels.sparse import native_source, spgemm_source

OPTIONS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-w", "-shared", "-fPIC")
WIDE = "-mprefer-vector-width=512"
"""Not every compiler knows it; the vectors are as wide without, but in two halves."""
PARTS = 4
"""For each thread, so that one that is held up does not hold up all."""
_building = Lock()


def native(*tensors: Tensor | None) -> bool:
    """Whether products of these tensors run in compiled code: float32 on a processor, with a compiler."""
    given = [tensor for tensor in tensors if tensor is not None]
    return all(t.device.type == "cpu" and t.dtype == torch.float32 for t in given) and library() is not None


def library() -> ctypes.CDLL | None:
    """The compiled products; None where no compiler makes them."""
    with _building:
        return _built()


@cache
def _built() -> ctypes.CDLL | None:
    compiler = cpp_compiler()
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "products.cpp"), Path(folder, "products.so")
        source.write_text(native_source.SOURCE + spgemm_source.SOURCE)
        for options in ((*OPTIONS, WIDE), OPTIONS):
            done = subprocess.run([compiler, *options, str(source), "-o", str(target)], capture_output=True)
            if done.returncode == 0:
                return ctypes.CDLL(str(target))
    return None


def run(name: str, arguments: Sequence[Tensor | int | None], count: int) -> None:
    """A function of the library over [0, count), parts of which go to threads: it takes the arguments, and behind them
    the first number of a part and the one after its last. Tensors must be contiguous."""
    function = getattr(library(), name)
    passed = [_passed(argument) for argument in arguments]

    def work(first: int, last: int) -> None:
        function(*passed, ctypes.c_int64(first), ctypes.c_int64(last))

    in_parts(work, count)


def in_parts(work: Callable[[int, int], None], count: int) -> None:
    threads = torch.get_num_threads()
    parts = min(count, PARTS * threads)
    if threads == 1 or parts < 2:
        work(0, count)
        return
    ends = [count * part // parts for part in range(parts + 1)]
    for done in [_pool(threads, os.getpid()).submit(work, *part) for part in pairwise(ends)]:
        done.result()


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "thrifty-sparse")


def _passed(argument: Tensor | int | None) -> ctypes.c_void_p | ctypes.c_int64:
    if isinstance(argument, int):
        return ctypes.c_int64(argument)
    assert argument is None or argument.is_contiguous()
    return ctypes.c_void_p(None if argument is None else argument.data_ptr())
