"""Out-of-memory errors of allocators, raised again with the phase, the peaks and a remedy."""

import errno
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from thrifty.core.errors import InfeasibleError, ThriftyError

_TEXTS = ("DefaultCPUAllocator", "out of memory", "Cannot allocate memory", "ALLOC_FAILED", "bad_alloc")
"""Messages of out-of-memory errors that have no exception type of their own."""
_SIZE = re.compile(r"allocate ([\d.]+) ?(bytes|[KMGT]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_LOOP = ("thrifty/training/loop.py", "train")
_PHASES = (
    ("thrifty/composition/compose.py", "changes", "a change of structure"),
    ("thrifty/composition/compose.py", "verify", "the check of promises"),
    ("thrifty/training/checkpoint.py", "save", "saving a checkpoint"),
    ("thrifty/training/checkpoint.py", "fill", "loading the checkpoint"),
    ("thrifty/training/evaluation.py", "", "the evaluation"),
    ("thrifty/optim/torch_optimizer.py", "step", "the update"),
    ("torch/autograd/graph.py", "_engine_run_backward", "the backward pass"),
    ("thrifty/composition/explain.py", "", "counting the run"),
    ("thrifty/composition/compose.py", "build_model", "building the model"),
    ("thrifty/composition/compose.py", "init_state", "building the optimizer"),
    ("thrifty/data/", "", "preparing the data"),
    ("thrifty/core/backward.py", "", "the forward pass"),
    (*_LOOP, "the forward pass"),
)
"""File, function and phase. The first entry in the error's traceback is reported, so inner phases come first."""


class OutOfMemory(InfeasibleError):
    """Error of an allocator that refused memory, with the phase of the run and a fix."""


@contextmanager
def explain_out_of_memory(
    predicted: float | None = None, remedy: Callable[[float], str] | None = None
) -> Iterator[None]:
    """Raise OutOfMemory in place of an allocator's error, after releasing the tensors in its traceback. `predicted` is
    the predicted peak in bytes: of the process, or of the tensors on a GPU. `remedy` returns the fix for the peak bytes
    that were available."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ThriftyError) or not is_out_of_memory(error):
            raise
        where = _phase([frame for frame, _ in traceback.walk_tb(error.__traceback__)])
        traceback.clear_frames(error.__traceback__)
        size = _SIZE.search(str(error))
        refused = f": {_megabytes(float(size[1]) * _UNITS[size[2].lower()])} more were refused" if size else ""
        on_device = "CUDA" in str(error)
        peak = torch.cuda.max_memory_allocated() if on_device else process_peak()
        holder = "tensors on the device" if on_device else "this process"
        prediction = "" if predicted is None else f"the predicted peak is {_megabytes(predicted)}, and "
        raise OutOfMemory(
            f"out of memory{where}{refused}; {prediction}{holder} held {_megabytes(peak)} at most",
            fix=(remedy or _usual_remedy)(peak),
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error, or one of its causes, is an out-of-memory error."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | OutOfMemory):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, ThriftyError) and any(text in str(error) for text in _TEXTS):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def process_peak() -> float:
    """Return the peak resident bytes of this process; 0 if the system does not report them."""
    try:
        match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return 0.0
    return int(match[1]) * 1024.0 if match else 0.0


def _phase(frames: list[FrameType]) -> str:
    step = next((frame.f_locals["state"].step + 1 for frame in frames if _is(frame, *_LOOP)), None)
    for file, function, phase in _PHASES:
        if any(_is(frame, file, function) for frame in frames):
            return f" in {phase}" + (f" of step {step}" if step else "")
    return ""


def _is(frame: FrameType, file: str, function: str) -> bool:
    return file in frame.f_code.co_filename and function in ("", frame.f_code.co_name)


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


def _usual_remedy(peak: float) -> str:
    return (
        f"thrifty plan RECIPE --memory {peak / 1e6:.0f}MB, which searches for a plan that fits; "
        "or --with large_batch.gradient_accumulation:micro_batches=2; or a smaller data.batch"
    )
