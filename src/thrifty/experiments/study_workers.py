"""Worker processes that measure cells. Each process uses one torch thread; by default there is one process per core.

A worker reads one cell as a JSON line from standard input, and writes one JSON line to standard output. For tiny
models, a second thread saves no time. Separate processes isolate the threads, random state and memory of each cell.
"""

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any

from thrifty.core.child_python import child_environment
from thrifty.core.errors import ThriftyError
from thrifty.core.out_of_memory import explain_out_of_memory
from thrifty.experiments.study import Settings


@dataclass(frozen=True)
class CellTask:
    """One cell to measure. `measure` is the name of the measure function, as `module:function`."""

    measure: str
    case: str
    settings: Settings
    seed: int


@dataclass(frozen=True)
class CellResult:
    task: CellTask
    numbers: dict[str, float]
    seconds: float


class CellWorker:
    """Process that measures one cell at a time."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE"),
        )

    def measure(self, task: CellTask) -> CellResult:
        """Measure one cell in the worker process. Raises ThriftyError if the measure fails or the process ends."""
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps(asdict(task)) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except (BrokenPipeError, ValueError):
            line = ""
        where = f"case {task.case!r}, seed {task.seed}"
        if not line:
            code = self.process.wait()
            raise ThriftyError(f"{where}: the process ended with code {code}", fix="if memory ran out: --jobs 1")
        answer = json.loads(line)
        if "error" in answer:
            raise ThriftyError(f"{where}: {answer['error']}")
        numbers = {name: math.inf if value is None else value for name, value in answer["numbers"].items()}
        return CellResult(task, numbers, answer["seconds"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def measure_all(tasks: Sequence[CellTask], jobs: int) -> Iterator[CellResult]:
    """Yield cells in the order in which they finish. If the caller stops the iteration, all processes end, too."""
    workers = [CellWorker() for _ in range(min(jobs, len(tasks)))]
    free: SimpleQueue[CellWorker] = SimpleQueue()
    for worker in workers:
        free.put(worker)

    def measure(task: CellTask) -> CellResult:
        worker = free.get()
        try:
            return worker.measure(task)
        finally:
            free.put(worker)

    with ThreadPoolExecutor(max(1, len(workers))) as pool:
        try:
            for answered in as_completed([pool.submit(measure, task) for task in tasks]):
                yield answered.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.kill()


def _serve() -> None:
    """Measure tasks until standard input closes; then end immediately, even in the middle of a cell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles interrupts
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # so that output of the measure is not mixed with the results
    tasks: SimpleQueue[str] = SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            tasks.put(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        replies.write(json.dumps(_answer(json.loads(tasks.get())), allow_nan=False) + "\n")
        replies.flush()


def _answer(task: dict[str, Any]) -> dict[str, Any]:
    module, _, function = task["measure"].partition(":")
    try:
        measure = getattr(importlib.import_module(module), function)
        if "torch" in sys.modules:  # if torch was not imported, no seed is needed
            sys.modules["torch"].manual_seed(task["seed"])
        began = time.perf_counter()
        with explain_out_of_memory():
            numbers = {name: float(value) for name, value in measure(seed=task["seed"], **task["settings"]).items()}
        seconds = time.perf_counter() - began
    except Exception as error:  # reported to the parent process, which adds the case and the seed
        return {"error": f"{type(error).__name__}: {error}"}
    finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
    return {"numbers": finite, "seconds": round(seconds, 3)}


if __name__ == "__main__":
    _serve()
