"""Workers: where the runs of a comparison are executed side by side, on this machine or on others that see its folders.

A turn, all variants with one seed or at one learning rate, is run by one worker: what is compared is measured in one
place.
"""

import shlex
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from queue import SimpleQueue

from thrifty.comparing.equal_budgets import Equal
from thrifty.comparing.run_launchers import RunLauncher, Worker
from thrifty.core.errors import UsageError
from thrifty.machine.cpu_features import usable_cores

HERE = "here"


def read_workers(texts: Sequence[str], equal: Equal) -> list[Worker]:
    """Read workers as they are typed: "here", or a command that is put before the run's own, such as "srun
    --nodelist=b --ntasks=1".

    Raises UsageError where runs would share a machine and be judged by time.
    """
    launchers = [_launcher(text) for text in texts or [HERE]]
    local = sum(not launcher for launcher in launchers)
    if local > 1 and equal == "time":
        raise UsageError(
            f"{local} workers are on this machine, and runs side by side take time from each other",
            fix="--equal-budget flops, tokens or steps, or one worker on each machine",
        )
    threads = max(1, len(usable_cores()) // local) if local > 1 else 0
    return [Worker(launcher, 0 if launcher else threads) for launcher in launchers]


def _launcher(text: str) -> tuple[str, ...]:
    if text.strip() == HERE:
        return ()
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--worker {text!r} is no command: {error}", fix="close its quotes") from error
    if not words:
        raise UsageError("a worker is empty", fix="--worker here, for this machine")
    return words


def run_on_workers(starts: Sequence[RunLauncher], turns: Iterable[Callable[[RunLauncher], None]]) -> None:
    """Run each turn on the worker that is free first; those of a single worker one after another, in this thread. When
    one fails, or this process receives a signal, the others save and end, and no turn begins any more."""
    if len(starts) == 1:
        for turn in turns:
            turn(starts[0])
        return
    free: SimpleQueue[RunLauncher] = SimpleQueue()
    for start in starts:
        free.put(start)

    def take(turn: Callable[[RunLauncher], None]) -> None:
        start = free.get()
        try:
            turn(start)
        finally:
            free.put(start)

    with ThreadPoolExecutor(len(starts)) as pool:
        taken = [pool.submit(take, turn) for turn in turns]
        try:
            for done in as_completed(taken):
                done.result()
        except BaseException:
            for waiting in taken:
                waiting.cancel()
            for start in starts:
                start.stop()
            raise
