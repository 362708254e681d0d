"""State of a thread, read from its stack: computing, waiting, or in an operation that may take minutes."""

import linecache
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_WAITING_FILES = ("torch/distributed/", "threading.py", "queue.py", "selectors.py")
_WAITING_CALLS = (".wait(", ".tolist(", ".item(", ".cpu(", "synchronize(")
"""Code of calls that wait for a device, and so for other ranks in the device's collectives. The innermost line of the
stack is searched for such code."""
_LONG_FILES = (
    "torch/_dynamo/convert_frame.py",
    "torch/_inductor/compile_fx.py",
    "thrifty/composition/compose.py",
    "/triton/",
)
"""Files that compile or build a model, which may happen in any step."""


@dataclass(frozen=True)
class ThreadState:
    """The position and activity of a thread."""

    where: str = ""
    """Position, such as `training/loop.py:71 in train`."""
    waits: bool = False
    """True if the thread waits for other ranks, a device or another thread."""
    long: bool = False
    """True if the thread is in an operation that may take minutes."""


def thread_state(thread: int) -> ThreadState:
    """Return the state of a thread of this process by its identifier."""
    innermost = sys._current_frames().get(thread)
    if innermost is None:
        return ThreadState()
    frames: list[FrameType] = []
    frame: FrameType | None = innermost
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    files = [frame.f_code.co_filename for frame in frames]
    line = linecache.getline(files[0], innermost.f_lineno or 0)  # None between two lines
    waits = any(part in files[0] for part in _WAITING_FILES) or any(call in line for call in _WAITING_CALLS)
    ours = next((frame for frame in frames if "thrifty/" in frame.f_code.co_filename), None)
    places = [innermost] if ours in (None, innermost) else [innermost, ours]
    return ThreadState(
        " called from ".join(_place(frame) for frame in places),
        waits=waits,
        long=any(part in file for file in files for part in _LONG_FILES),
    )


def _place(frame: FrameType) -> str:
    file = "/".join(Path(frame.f_code.co_filename).parts[-2:])
    return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
