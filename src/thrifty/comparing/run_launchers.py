"""Launchers for the runs of a comparison: one process per run, or one process per rank.

A run on this machine is a fork of a server that has imported torch. A run on another machine is a new Python process.

A process reads its task from a file next to the run's folder, and writes its result to another file there. The
process may therefore run on another machine with the same file system.
"""

import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import IO, Any, Protocol

from thrifty.comparing.equal_budgets import StepCost
from thrifty.comparing.fork_server import CAN_FORK, ForkedProcess, ForkServer
from thrifty.comparing.run_process import ending_of, read_exit, summary_of
from thrifty.core.child_python import child_environment
from thrifty.core.errors import UsageError
from thrifty.core.recipe import Recipe
from thrifty.core.secret_redaction import redact_command
from thrifty.machine.energy_meter import EnergyMeter, counters
from thrifty.machine.lock_owner import lock_owner
from thrifty.recipes.recipe_toml import recipe_to_data
from thrifty.training.process_launch import python
from thrifty.training.sent_objects import write_value

SAVING = 600.0
"""Maximum time in seconds to wait for a run to save after its parent process was killed."""
LOOK = 5.0
"""Interval in seconds between readings of the energy counters."""
RunProcess = subprocess.Popen[bytes] | ForkedProcess
SIGNALLED = (130, 143)
"""Exit codes of a run that was stopped by a signal."""


@dataclass(frozen=True)
class RunExit:
    """Exit code, error, time and energy of a run's process."""

    exit_code: int
    error: str
    """Error message of a failed run, or the last line of its output."""
    elapsed: float
    """Seconds from the last start of the run to its end, including startup, evaluation and saving."""
    joules: float | None
    """Energy in joules that the machine used in this time; None without a counter, or if only part of the run was
    measured.
    """

    @property
    def status(self) -> str:
        if self.exit_code in SIGNALLED:
            return "interrupted"
        return "failed" if self.exit_code else "finished"

    def as_data(self) -> dict[str, Any]:
        return {"status": self.status, **vars(self)}


STOPPED = RunExit(143, "", 0.0, None)
"""Result of a run that did not start because the comparison was stopped."""


class RunStopped(Exception):
    """A signal stopped a run, which is saved. `exit_code` is the code of the signal."""

    def __init__(self, exit_code: int):
        self.exit_code = exit_code


@contextmanager
def closing_workers(workers: Sequence["RunLauncher"]) -> Iterator[None]:
    """End the processes of all workers at the end of the context."""
    try:
        yield
    finally:
        for worker in workers:
            worker.close()


class RunLauncher(Protocol):
    """Launcher that runs one recipe at a time to its end in the folder `runs`/NAME, and resumes an interrupted run."""

    def __call__(self, recipe: Recipe, runs: Path, /) -> RunExit: ...

    def count(self, recipe: Recipe, runs: Path, /) -> tuple[RunExit, StepCost | None]:
        """Count a step of a recipe without training; the cost is None if counting failed or was stopped."""

    def stop(self) -> None:
        """End the current run after the run has saved, and start no further run. Any thread may call this method."""

    def close(self) -> None:
        """End all processes of the launcher. Its runs have ended."""


@dataclass
class Worker:
    """Launcher that starts each run as a separate process, so that runs do not share peak memory or compiled code. A
    signal to the calling process also ends the run, after the run has saved. `close` ends the worker's own processes.
    """

    launcher: Sequence[str] = ()
    """Command prefix, such as "srun --nodelist=b", that starts processes on another machine; empty for this machine."""
    threads: int = 0
    """Number of threads of each process if parallel runs share the cores; 0 to use all cores."""

    def __post_init__(self) -> None:
        self._stopped = Event()
        self._process: RunProcess | None = None
        self._server: ForkServer | None = None

    def __call__(self, recipe: Recipe, runs: Path, /) -> RunExit:
        return self._end_of(recipe, runs, is_counted=False)[0]

    def count(self, recipe: Recipe, runs: Path, /) -> tuple[RunExit, StepCost | None]:
        ended, ending = self._end_of(recipe, runs, is_counted=True)
        return ended, StepCost(**ending["cost"]) if "cost" in ending else None

    def _end_of(self, recipe: Recipe, runs: Path, is_counted: bool) -> tuple[RunExit, dict[str, Any]]:
        """Start a process and wait for its end. Return its exit, and the ending that the process wrote."""
        if self._stopped.is_set():
            return STOPPED, {}
        if self.launcher and recipe.objects.is_passed:
            raise UsageError("objects from Python are not sent to other machines", fix="leave out --worker")
        wait_for_release(runs / recipe.name / "lock")
        began, whole = time.monotonic(), not summary_of(runs / recipe.name)
        alone = not self.launcher and not self.threads
        meter = EnergyMeter(counters() if alone else {})
        task = runs / f"{recipe.name}.task.json"
        where = {"runs": str(runs.absolute()), "folder": os.getcwd()}
        runs.mkdir(parents=True, exist_ok=True)
        task.with_suffix(".end").unlink(missing_ok=True)  # left by a run whose parent process was killed
        task.write_text(json.dumps({"recipe": recipe_to_data(recipe), **where, "is_counted": is_counted}))
        try:
            with tempfile.TemporaryDirectory(prefix="thrifty-run-") as private:
                code, error = self._run(recipe, [str(task.absolute()), *_sent(recipe, Path(private))], meter)
            ending = read_exit(task)
        finally:
            task.unlink()
            task.with_suffix(".end").unlink(missing_ok=True)
        if code < 0:
            error = f"its process was ended by signal {-code}; memory may have run out. Its last output: {error}"
        ending = {"exit_code": code, "error": error, **ending}
        return _exit_of(ending, time.monotonic() - began, meter.read_joules() if whole and alone else None), ending

    def stop(self) -> None:
        self._stopped.set()
        if self._process:
            _close_stdin(self._process)

    def close(self) -> None:
        if self._server:
            self._server.close()
            self._server = None

    def _start(self, recipe: Recipe, arguments: list[str], output: IO[str]) -> RunProcess:
        ranks = recipe.mesh.least_ranks
        threads = {"OMP_NUM_THREADS": str(self.threads)} if self.threads else {}
        if CAN_FORK and ranks == 1 and not self.launcher:
            if self._server is None or not self._server.is_alive:
                self._server = ForkServer(output, **threads)
            return self._server.start(arguments, output)
        # a new session: an interrupt at the terminal reaches only this parent process, which then ends the run
        return subprocess.Popen(
            [*self.launcher, *python(ranks), "-m", "thrifty.comparing.run_process", *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=child_environment(**threads),
            start_new_session=True,
        )

    def _run(self, recipe: Recipe, arguments: list[str], meter: EnergyMeter) -> tuple[int, str]:
        """Return the exit code and, for a failed process, the last line of its output."""
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = self._process = self._start(recipe, arguments, output)
            try:
                if self._stopped.is_set():  # stopped after the first check
                    _close_stdin(process)
                code = _wait(process, meter)
            finally:
                _close_stdin(process)
                process.wait()
            output.seek(0)
            lines = output.read().split("\n")
        return code, next((line for line in reversed(lines) if line.strip()), "it printed nothing") if code else ""


class SameProcess:
    """Launcher that executes runs in the calling process, for objects that cannot be sent to another process."""

    def __call__(self, recipe: Recipe, runs: Path, /) -> RunExit:
        began = time.monotonic()
        return _exit_of(ending_of(recipe, runs, is_counted=False), time.monotonic() - began, None)

    def count(self, recipe: Recipe, runs: Path, /) -> tuple[RunExit, StepCost | None]:
        ending = ending_of(recipe, runs, is_counted=True)
        return _exit_of(ending, 0.0, None), StepCost(**ending["cost"]) if "cost" in ending else None

    def stop(self) -> None:
        """Do nothing, because runs in this process end by themselves."""

    def close(self) -> None:
        """Do nothing, because there is no other process."""


def _exit_of(ending: Mapping[str, Any], elapsed: float, joules: float | None) -> RunExit:
    return RunExit(ending["exit_code"], " ".join(redact_command(ending["error"].split())), elapsed, joules)


def _sent(recipe: Recipe, folder: Path) -> list[str]:
    """Write a recipe's objects for the run's process; return the command-line argument with the path of the file."""
    if not recipe.objects.is_passed:
        return []
    write_value(recipe.objects, folder / "objects")
    return [str(folder / "objects")]


def _close_stdin(process: RunProcess) -> None:
    """Close the standard input of a run's process. The run then saves and ends."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()


def wait_for_release(lock: Path) -> None:
    """Wait until the run of a killed comparison has saved and released its lock. Otherwise, a new start would fail."""
    end = time.monotonic() + SAVING
    while lock_owner(lock).get("host") == socket.gethostname() and time.monotonic() < end:
        time.sleep(0.1)


def _wait(process: RunProcess, meter: EnergyMeter) -> int:
    """Return the exit code of a process: 130 or 143 if SIGINT or SIGTERM ended the process, even before its run could
    save.
    """
    while True:
        try:
            code = process.wait(LOOK)
            return 128 - code if 128 - code in SIGNALLED else code
        except subprocess.TimeoutExpired:
            meter.read_joules()
