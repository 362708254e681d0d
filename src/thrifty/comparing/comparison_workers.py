"""Lanes: places where the runs of a comparison go on side by side, on this machine or on others that see its folders.

A turn, which is all arms with one seed or at one learning rate, is run in one lane, so that what is compared was
measured in one place.
"""

import os
import shlex
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from queue import SimpleQueue

from thrifty.comparing.equal_budgets import Equal
from thrifty.comparing.run_launchers import RunLauncher, Worker
from thrifty.core.errors import UsageError
from thrifty.machine.cpu_features import usable_cores

HERE = "here"
SLURM = "slurm"
ON_NODE = "srun --nodelist={} --nodes=1 --ntasks=1 --overlap --cpu-bind=none"
"""Starts a run with all that the job has of one of its nodes."""


def read_workers(texts: Sequence[str], equal: Equal) -> list[Worker]:
    """Lanes as they are typed: "here", "slurm" for one on each node of the job that this process is in, or a command
    that is put before the run's own, such as "srun --nodelist=b --ntasks=1".

    Raises UsageError where runs would share a machine and be judged by time.
    """
    launchers = [launcher for text in texts or [HERE] for launcher in _launchers(text)]
    local = sum(not launcher for launcher in launchers)
    if local > 1 and equal == "time":
        raise UsageError(
            f"{local} workers are on this machine, and runs side by side take time from each other",
            fix="--equal-budget flops, tokens or steps, or one worker on each machine",
        )
    threads = max(1, len(usable_cores()) // local) if local > 1 else 0
    return [Worker(launcher, 0 if launcher else threads) for launcher in launchers]


def _launchers(text: str) -> list[tuple[str, ...]]:
    if text.strip() == HERE:
        return [()]
    if text.strip() == SLURM:
        return [tuple(ON_NODE.format(node).split()) for node in _nodes_of_job()]
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--worker {text!r} is no command: {error}", fix="close its quotes") from error
    if not words:
        raise UsageError("a worker is empty", fix="--worker here is this machine")
    return [words]


def _nodes_of_job() -> list[str]:
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise UsageError("this is no SLURM job, so it has no nodes", fix="start it by sbatch or under salloc")
    try:
        listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(f"SLURM does not say which nodes {nodes} are: {error}", fix="name each by --worker") from error
    return listed.stdout.split()


def run_on_workers(starts: Sequence[RunLauncher], turns: Iterable[Callable[[RunLauncher], None]]) -> None:
    """Each turn in the lane that is free first; those of one lane one after another, in this thread. When one fails, or
    this process is told to end, the others save what they are at, and none begins any more."""
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
