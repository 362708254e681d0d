"""How the runs of a comparison are started: each in a process of its own, or over several ranks in as many.

What a process is to do, and how that ended, are files beside the run's folder, so that it may be on another machine
that sees the same folders.
"""

import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, Protocol

from thrifty.comparing.run_process import read_exit, run_outcome, summary_of
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
"""Seconds that a run whose starter was killed may take to end its step and save."""
LOOK = 5.0
"""Seconds between looks at the energy counters."""
SIGNALLED = (130, 143)
"""Exit codes of a run that was asked to stop."""


@dataclass(frozen=True)
class RunExit:
    """How a run ended."""

    exit_code: int
    error: str
    """What it said last, where it failed."""
    elapsed: float
    """Seconds from its last start to its end, so with what starting, evaluating and saving took."""
    joules: float | None
    """Of the machine in that time; None where nothing counts it, or only part of the run was seen."""

    @property
    def status(self) -> str:
        if self.exit_code in SIGNALLED:
            return "interrupted"
        return "failed" if self.exit_code else "finished"

    def as_data(self) -> dict[str, Any]:
        return {"status": self.status, **vars(self)}


STOPPED = RunExit(143, "", 0.0, None)
"""Of a run that was not started any more."""


class RunLauncher(Protocol):
    """Takes one run at a time to its end in runs/NAME, whatever of it is there already."""

    def __call__(self, recipe: Recipe, runs: Path, /) -> RunExit: ...

    def stop(self) -> None:
        """Let the run that is going on save and end, and start none after it; may come from another thread."""


@dataclass
class Worker:
    """Starts runs as processes: peak memory and compiled code of one are none of the next one's. A signal to this
    process ends the run's too, once it has saved."""

    launcher: Sequence[str] = ()
    """The command that starts them elsewhere, such as srun on a node; none is this machine."""
    threads: int = 0
    """Of each process, where runs beside it have the other cores; 0 leaves it all of them."""

    def __post_init__(self) -> None:
        self._stopped = Event()
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, recipe: Recipe, runs: Path, /) -> RunExit:
        if self._stopped.is_set():
            return STOPPED
        if self.launcher and recipe.objects.is_passed:
            raise UsageError("objects from Python are not sent to other machines", fix="leave out --worker")
        wait_for_release(runs / recipe.name / "lock")
        began, whole = time.monotonic(), not summary_of(runs / recipe.name)
        alone = not self.launcher and not self.threads
        meter = EnergyMeter(counters() if alone else {})
        task = runs / f"{recipe.name}.task.json"
        told = {"recipe": recipe_to_data(recipe), "runs": str(runs.absolute()), "folder": os.getcwd()}
        runs.mkdir(parents=True, exist_ok=True)
        task.with_suffix(".end").unlink(missing_ok=True)  # of a run whose starter was killed
        task.write_text(json.dumps(told))
        try:
            with tempfile.TemporaryDirectory(prefix="thrifty-run-") as private:
                code, said = self._run([*self._command(recipe, task), *_sent(recipe, Path(private))], meter)
            ending = read_exit(task)
        finally:
            task.unlink()
            task.with_suffix(".end").unlink(missing_ok=True)
        code, error = (ending["exit_code"], ending["error"]) if ending else (code, said)
        if code < 0:
            error = f"its process was ended by signal {-code}; memory may have run out. It said last: {error}"
        elapsed = time.monotonic() - began
        joules = meter.read_joules() if whole and alone else None
        return RunExit(code, " ".join(redact_command(error.split())), elapsed, joules)

    def stop(self) -> None:
        self._stopped.set()
        if self._process:
            _let_go(self._process)

    def _command(self, recipe: Recipe, task: Path) -> list[str]:
        start = python(recipe.mesh.least_ranks)
        return [*self.launcher, *start, "-m", "thrifty.comparing.run_process", str(task.absolute())]

    def _run(self, command: list[str], meter: EnergyMeter) -> tuple[int, str]:
        """Its exit code and, where it failed, the last thing it said."""
        threads = {"OMP_NUM_THREADS": str(self.threads)} if self.threads else {}
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            # an interrupt at the terminal is for this process, which ends the other in order
            process = self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                env=child_environment(**threads),
                start_new_session=True,
            )
            try:
                if self._stopped.is_set():  # since it was looked at
                    _let_go(process)
                code = _waited(process, meter)
            finally:
                _let_go(process)
                process.wait()
            said.seek(0)
            lines = said.read().split("\n")
        return code, next((line for line in reversed(lines) if line.strip()), "it said nothing") if code else ""


class SameProcess:
    """Starts runs in this process, for objects that no other one can be given."""

    def __call__(self, recipe: Recipe, runs: Path, /) -> RunExit:
        began = time.monotonic()
        code, error = run_outcome(recipe, runs)
        return RunExit(code, " ".join(redact_command(error.split())), time.monotonic() - began, None)

    def stop(self) -> None:
        """Do nothing: one such run is all there is."""


def _sent(recipe: Recipe, folder: Path) -> list[str]:
    """Write the objects that a recipe holds for the process of a run; return the word that names them to it."""
    if not recipe.objects.is_passed:
        return []
    write_value(recipe.objects, folder / "objects")
    return [str(folder / "objects")]


def _let_go(process: subprocess.Popen[bytes]) -> None:
    """A run whose standard input is at its end saves and ends."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()


def wait_for_release(lock: Path) -> None:
    """A start right after a kill may find the run still saving; refused, it would be listed as failed."""
    end = time.monotonic() + SAVING
    while lock_owner(lock).get("host") == socket.gethostname() and time.monotonic() < end:
        time.sleep(0.1)


def _waited(process: subprocess.Popen[bytes], meter: EnergyMeter) -> int:
    """The exit code; that of a stop also where the signal came before the run could save."""
    while True:
        try:
            code = process.wait(LOOK)
            return 128 - code if 128 - code in SIGNALLED else code
        except subprocess.TimeoutExpired:
            meter.read_joules()
