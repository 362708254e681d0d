"""Parallel workers for the runs of a comparison, on this machine or on other machines with the same file system.

All variants with one seed, or at one trial learning rate, run on one worker, so that compared runs share a machine.
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
    """Return workers from command-line texts: "here", or a command prefix such as "srun --nodelist=b --ntasks=1".
    Raises UsageError if several runs would share this machine although budgets have equal time.
    """
    launchers = [_launcher(text) for text in texts or [HERE]]
    local = sum(not launcher for launcher in launchers)
    if local > 1 and equal == "time":
        raise UsageError(
            f"{local} workers are on this machine, but equal time allows 1, because parallel runs slow each other down",
            fix="--equal-budget flops; or one worker on each machine",
        )
    threads = max(1, len(usable_cores()) // local) if local > 1 else 0
    return [Worker(launcher, 0 if launcher else threads) for launcher in launchers]


def _launcher(text: str) -> tuple[str, ...]:
    if text.strip() == HERE:
        return ()
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            f"--worker {text!r} is not a command: {error}", fix="close the quotes of the command"
        ) from error
    if not words:
        raise UsageError("--worker '' is not a command", fix="--worker here")
    return words


def run_on_workers(starts: Sequence[RunLauncher], turns: Iterable[Callable[[RunLauncher], None]]) -> None:
    """Run each group of runs, a function in `turns`, on the next free worker; a single worker runs all groups in this
    thread. If a group fails, or this process receives a signal, the other runs save and end, and no further group
    starts.
    """
    if len(starts) == 1:
        for turn in turns:
            turn(starts[0])
        return
    free: SimpleQueue[RunLauncher] = SimpleQueue()
    for start in starts:
        free.put(start)

    def run_turn(turn: Callable[[RunLauncher], None]) -> None:
        start = free.get()
        try:
            turn(start)
        finally:
            free.put(start)

    with ThreadPoolExecutor(len(starts)) as pool:
        futures = [pool.submit(run_turn, turn) for turn in turns]
        try:
            for done in as_completed(futures):
                done.result()
        except BaseException:
            for waiting in futures:
                waiting.cancel()
            for start in starts:
                start.stop()
            raise
