"""Probes: timed steps of a candidate in a separate process. Results are cached for this machine."""

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

from thrifty.core.child_python import child_environment
from thrifty.core.errors import ThriftyError
from thrifty.core.kept_results import keep, kept_path, read_kept
from thrifty.core.user_objects import UserObjects
from thrifty.machine.machine_info import machine_identity
from thrifty.planning.cost_estimates import StepTiming
from thrifty.training.process_launch import python, settings
from thrifty.training.sent_objects import write_value

IRRELEVANT = ("name", "about", "budget", "checkpoints")
"""Sections of a recipe that do not change the step time."""

LONGEST = 600.0
"""Time limit of a probe in seconds."""
SHORTEST = 3.0
"""Minimum seconds for a probe: importing torch takes about this long."""
ENDING = 2.0
"""Seconds for a compiler to remove its unfinished files at the time limit, before its process is killed."""


class ProbeError(ThriftyError):
    """The error of a probe that ended without a result."""


class ProbeTimeout(ProbeError):
    """The error of a probe that did not complete within its time limit."""


@dataclass(frozen=True)
class ProbeJob:
    """Input of a probe: a recipe as tables, without micro-batch techniques, and the micro-batch sizes to time."""

    recipe: Mapping[str, Any]
    steps: int
    """Number of steps of the whole run."""
    rows: tuple[int, ...]
    parts: int
    seconds: float
    counted: tuple[float, float]
    """Counted bytes and FLOPs of the candidate. In the cache, they distinguish models with the same name."""
    bar: float = math.inf
    """Step time in seconds. If a step with the largest size takes longer, smaller sizes are not timed."""

    @property
    def ranks(self) -> int:
        return math.prod(size for size in self.recipe.get("mesh", {}).values() if size)

    def as_dict(self) -> dict[str, Any]:
        relevant = {name: section for name, section in self.recipe.items() if name not in IRRELEVANT}
        return {**vars(self), "recipe": relevant, "bar": min(self.bar, sys.float_info.max)}  # JSON has no infinity

    def is_covered_by(self, timing: StepTiming) -> bool:
        """Return True if a cached timing has all sizes of the job, or if its step is slower than `bar`."""
        batch = self.parts * self.rows[-1]
        return timing.rows == self.rows or timing.least_step(batch, self.parts) > self.bar


Probe = Callable[[ProbeJob], StepTiming]
"""Function that runs a job and returns the timing. Raises ProbeError."""


def sizes(batch: int, parts: int, compiled: bool, fixed: bool = False) -> tuple[int, ...]:
    """Return the micro-batch sizes that a probe times, for a step of `batch` examples in `parts` micro-batches.

    The sizes are the plan's size, a half and a quarter of it. With `compiled`, the quarter is omitted, because each
    shape compiles for seconds. With `fixed`, only the plan's size is timed.
    """
    rows = -(-batch // parts)
    if fixed:
        return (rows,)
    return tuple(sorted({-(-rows // divisor) for divisor in ((1, 2) if compiled else (1, 2, 4))}))


def cache_probe(probe: Probe, device: str) -> Probe:
    """Return a probe with cached results for this machine. Disturbed measurements are not cached."""
    # the key "counts" excludes older results, whose memory included mapped files
    machine = machine_identity(device) | {"counts": "what the system cannot drop"}

    def cached(job: ProbeJob) -> StepTiming:
        identity = {name: value for name, value in job.as_dict().items() if name != "bar"}
        path = kept_path("plans/probes", identity | machine)
        with suppress(ValueError, TypeError, LookupError):  # missing or damaged
            timing = StepTiming.from_dict(read_kept(path)["timing"])
            if job.is_covered_by(timing):
                return timing
        timing = probe(job)
        if not timing.is_disturbed:
            keep(path, {"timing": timing.as_dict(), "job": job.as_dict(), "machine": machine})
        return timing

    return cached


def probe_in_process(
    module: str, limit: Callable[[], float] = lambda: LONGEST, objects: UserObjects | None = None
) -> Probe:
    """Return a probe that runs `module` in one process per rank of the job's mesh, for at most `limit()` seconds.

    The module receives the path of a job file and writes its result to `answer_file(job_file)`.
    """

    def probe(job: ProbeJob) -> StepTiming:
        seconds = limit()
        if seconds < SHORTEST:
            raise ProbeTimeout("no time was left to run its steps")
        with tempfile.TemporaryDirectory() as folder:
            job_file = Path(folder, "job.json")
            job_file.write_text(json.dumps(job.as_dict(), default=str), encoding="utf-8")
            write_value(objects or UserObjects(), objects_file(job_file))
            code, stderr = _run([*python(job.ranks), "-m", module, str(job_file)], job.ranks, seconds)
            with suppress(OSError):
                answer = json.loads(answer_file(job_file).read_text(encoding="utf-8"))
                if "refused" in answer:
                    raise ProbeError(answer["refused"].splitlines()[0])
                return StepTiming.from_dict(answer)
        if code == -9 or "(exitcode: -9)" in stderr:
            raise ProbeError("its process was killed, probably because the system ran out of memory")
        lines = [line for line in stderr.splitlines() if line.strip()]
        raise ProbeError(lines[-1].strip() if lines else f"its process ended with exit code {code}")

    return probe


def objects_file(job_file: Path) -> Path:
    return job_file.with_suffix(".objects")


def answer_file(job_file: Path) -> Path:
    return job_file.with_suffix(".answer.json")


def write_probe_answer(job_file: Path, answer: Mapping[str, Any]) -> None:
    """Write the result of a job: a timing, or "refused" with a reason. The result of the first rank that
    writes is kept.
    """
    with tempfile.NamedTemporaryFile("w", dir=job_file.parent, encoding="utf-8") as file:
        json.dump(dict(answer), file)
        file.flush()
        with suppress(FileExistsError):  # the link is atomic, so the file is complete or missing
            os.link(file.name, answer_file(job_file))


def _run(command: Sequence[str], ranks: int, limit: float) -> tuple[int, str]:
    """Run a command and return its exit code and standard error. Raises ProbeTimeout at the time limit."""
    process = subprocess.Popen(
        [*command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=settings(ranks) | child_environment(),
    )
    try:
        stderr = process.communicate(timeout=limit)[1]
        return process.returncode, stderr
    except subprocess.TimeoutExpired:
        raise ProbeTimeout(f"its steps did not complete within {limit:.0f} s") from None
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and its children, because the ranks of torchrun would otherwise continue to run.

    A terminated compiler removes its unfinished file, which would otherwise stay in the cache of compiled code.
    """
    if process.poll() is not None:
        return
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        family = [*parent.children(recursive=True), parent]
        for signal in (psutil.Process.terminate, psutil.Process.kill):
            for one in family:
                with suppress(psutil.NoSuchProcess):
                    signal(one)
            _, family = psutil.wait_procs(family, timeout=ENDING)
    process.wait()
