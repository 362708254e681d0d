"""How the runs of a comparison are started: one at a time, each in a process of its own."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thrifty.comparing.energy import EnergyMeter, counters
from thrifty.comparing.one_run import run_to_end, summary_of
from thrifty.core.errors import ThriftyError
from thrifty.core.recipe import Recipe
from thrifty.preparing import BuildModel
from thrifty.recipes.toml import recipe_to_data
from thrifty.training.environment import redacted
from thrifty.training.lock import holder

SAVING = 600.0
"""Seconds that a run whose starter was killed may take to end its step and save."""
LOOK = 5.0
"""Seconds between looks at the energy counters."""
SIGNALLED = (130, 143)
"""Exit codes of a run that was asked to stop."""


@dataclass(frozen=True)
class Ended:
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


Start = Callable[[Recipe, Path], Ended]
"""Brings a run to its end in runs/NAME, whatever of it is there already."""


def in_own_process(recipe: Recipe, runs: Path) -> Ended:
    """Peak memory and compiled code of one run are none of the next one's. A signal to this process ends the run's too,
    once it has saved."""
    wait_for_release(runs / recipe.name / "lock")
    began, whole = time.monotonic(), not summary_of(runs / recipe.name)
    meter = EnergyMeter(counters())
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "thrifty.comparing.one_run"],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # an interrupt at the terminal is for this process, which ends the other in order
        )
        assert process.stdin is not None
        try:
            with suppress(BrokenPipeError):  # it ended at once, and has said why
                process.stdin.write(json.dumps({"recipe": recipe_to_data(recipe), "runs": str(runs)}) + "\n")
                process.stdin.flush()
            code = _waited(process, meter)
        finally:
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()
        said.seek(0)
        lines = said.read().split("\n")
    error = next((line for line in reversed(lines) if line.strip()), "it said nothing") if code else ""
    if code < 0:
        error = f"its process was ended by signal {-code}; memory may have run out. It said last: {error}"
    return Ended(code, " ".join(redacted(error.split())), time.monotonic() - began, meter.look() if whole else None)


def wait_for_release(lock: Path) -> None:
    """A start right after a kill may find the run still saving; refused, it would be listed as failed."""
    end = time.monotonic() + SAVING
    while holder(lock).get("host") == socket.gethostname() and time.monotonic() < end:
        time.sleep(0.1)


def _waited(process: subprocess.Popen[str], meter: EnergyMeter) -> int:
    """The exit code; that of a stop also where the signal came before the run could save."""
    while True:
        try:
            code = process.wait(LOOK)
            return 128 - code if 128 - code in SIGNALLED else code
        except subprocess.TimeoutExpired:
            meter.look()


def here(model: BuildModel | None = None) -> Start:
    """Starts runs in this process: for models that a function makes. Their peak memory is that of the process, and the
    first run bears what is made once."""

    def start(recipe: Recipe, runs: Path) -> Ended:
        began = time.monotonic()
        try:
            code, error = run_to_end(recipe, runs, model)["exit_code"], ""
        except ThriftyError as failed:
            code, error = failed.exit_code, str(failed).replace("\n", " ")
        return Ended(code, error, time.monotonic() - began, None)

    return start
