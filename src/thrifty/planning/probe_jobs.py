"""Probes: steps of a candidate, run in processes of their own and kept for this machine."""

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from thrifty.core.cache_dir import cache_folder
from thrifty.core.child_python import child_environment
from thrifty.core.errors import ThriftyError
from thrifty.core.user_objects import UserObjects
from thrifty.machine.machine_info import machine_identity
from thrifty.planning.cost_estimates import StepTiming
from thrifty.training.process_launch import python, settings
from thrifty.training.sent_objects import write_value

IRRELEVANT = ("name", "about", "budget", "checkpoints")
"""Sections of a recipe that change nothing about how long a step takes."""

LONGEST = 600.0
"""Seconds that a probe may take in all."""


class ProbeError(ThriftyError):
    """A probe ended without a result; says how."""


@dataclass(frozen=True)
class ProbeJob:
    """What a probe is asked: a recipe as tables, without what cuts its batches apart, and the sizes to try."""

    recipe: Mapping[str, Any]
    steps: int
    """Of the whole run, for what depends on them."""
    rows: tuple[int, ...]
    parts: int
    seconds: float
    counted: tuple[float, float]
    """Bytes and FLOPs of the candidate: they tell models apart that are called alike, such as two folders of one name
    in different places."""
    bar: float = math.inf
    """Seconds of a step from which on the smaller sizes are of no use."""

    @property
    def ranks(self) -> int:
        return math.prod(size for size in self.recipe.get("mesh", {}).values() if size)

    def as_dict(self) -> dict[str, Any]:
        relevant = {name: section for name, section in self.recipe.items() if name not in IRRELEVANT}
        return {**vars(self), "recipe": relevant, "bar": min(self.bar, sys.float_info.max)}  # JSON has no infinity

    def is_answered_by(self, timing: StepTiming) -> bool:
        """Whether nothing is missing there, but what the bar leaves out."""
        batch = self.parts * self.rows[-1]
        return timing.rows == self.rows or timing.least_step(batch, self.parts) > self.bar


Probe = Callable[[ProbeJob], StepTiming]
"""Raises ProbeError."""


def sizes(batch: int, parts: int, compiled: bool, fixed: bool = False) -> tuple[int, ...]:
    """The micro-batches to try for a step of `batch` examples in so many parts: that of the plan, its half, and its
    quarter where no compiler asks for seconds at each new shape; the plan's alone where they are `fixed`."""
    rows = -(-batch // parts)
    if fixed:
        return (rows,)
    return tuple(sorted({-(-rows // divisor) for divisor in ((1, 2) if compiled else (1, 2, 4))}))


def cache_probe(probe: Probe, device: str) -> Probe:
    """A probe whose results are kept for this machine, and not made again; but for those that other work disturbed."""
    here = machine_identity(device) | {"counts": "what the system cannot drop"}  # earlier results had mapped files, too

    def found_or_made(job: ProbeJob) -> StepTiming:
        same = {name: value for name, value in job.as_dict().items() if name != "bar"}
        asked = json.dumps(same | here, sort_keys=True, default=str)
        path = cache_folder() / "plans" / "probes" / f"{hashlib.sha256(asked.encode()).hexdigest()[:24]}.json"
        with suppress(OSError, ValueError, TypeError, LookupError):  # not there, or damaged
            timing = StepTiming.from_dict(json.loads(path.read_text(encoding="utf-8"))["timing"])
            if job.is_answered_by(timing):
                return timing
        timing = probe(job)
        if timing.is_disturbed:
            return timing
        with suppress(OSError):  # no room, or not allowed to: measured again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
                json.dump({"timing": timing.as_dict(), "job": job.as_dict(), "machine": here}, file, default=str)
            os.replace(file.name, path)
        return timing

    return found_or_made


def probe_in_process(module: str, limit: float = LONGEST, objects: UserObjects | None = None) -> Probe:
    """Probes of a recipe with `objects` by a module that is given the file of a job, over as many ranks as the job's
    mesh has, and writes its answer beside it (`answer`); it may take `limit` seconds in all."""

    def probe(job: ProbeJob) -> StepTiming:
        with tempfile.TemporaryDirectory() as folder:
            asked = Path(folder, "job.json")
            asked.write_text(json.dumps(job.as_dict(), default=str), encoding="utf-8")
            write_value(objects or UserObjects(), objects_file(asked))
            code, said = _ended([*python(job.ranks), "-m", module, str(asked)], job.ranks, limit)
            with suppress(OSError):
                answer = json.loads(answer_file(asked).read_text(encoding="utf-8"))
                if "refused" in answer:
                    raise ProbeError(answer["refused"].splitlines()[0])
                return StepTiming.from_dict(answer)
        if code == -9 or "(exitcode: -9)" in said:
            raise ProbeError("its process was killed, as the system does when memory runs out")
        lines = [line for line in said.splitlines() if line.strip()]
        raise ProbeError(lines[-1].strip() if lines else f"its process ended with exit code {code}")

    return probe


def objects_file(asked: Path) -> Path:
    return asked.with_suffix(".objects")


def answer_file(asked: Path) -> Path:
    return asked.with_suffix(".answer.json")


def write_probe_answer(asked: Path, answer: Mapping[str, Any]) -> None:
    """A timing, or what was "refused", by whichever rank says it first."""
    with tempfile.NamedTemporaryFile("w", dir=asked.parent, encoding="utf-8") as file:
        json.dump(dict(answer), file)
        file.flush()
        with suppress(FileExistsError):  # whole or not at all, whenever its process ends
            os.link(file.name, answer_file(asked))


def _ended(command: Sequence[str], ranks: int, limit: float) -> tuple[int, str]:
    """The exit code of a command and what it said on standard error. Raises ProbeError where it takes too long."""
    process = subprocess.Popen(
        [*command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=settings(ranks) | child_environment(),
    )
    try:
        said = process.communicate(timeout=limit)[1]
        return process.returncode, said
    except subprocess.TimeoutExpired:
        raise ProbeError(f"its steps were not done after {limit:.0f} s") from None
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Kills a process that has not ended, and what it started: torchrun's ranks would outlive it."""
    if process.poll() is not None:
        return
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid)
        for one in [*family.children(recursive=True), family]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()
