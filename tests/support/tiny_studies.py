"""Studies of nothing, measured in no time: sums of a setting and noise, and a program that runs one of them."""

import math
import signal
import sys
import time
from pathlib import Path

import numpy as np

from thrifty.experiments.study import Cells, MeasuredQuantity, Study, StudyPlot
from thrifty.experiments.study_result import StudyCell, StudyResult


def measure(seed: int, level: float, log: str = "", seconds: float = 0.0, spread: float = 0.1) -> dict[str, float]:
    """Writes down that it was asked, before and after it does its work."""
    _write(log, f"began {level} {seed}")
    time.sleep(seconds)
    _write(log, f"ended {level} {seed}")
    noise = float(np.random.default_rng([seed, int(10 * level)]).normal())
    return {"height": level + spread * noise, "never": math.inf if level > 2 else 1.0, "seconds": time.perf_counter()}


def _write(log: str, line: str) -> None:
    if log:
        with open(log, "a") as file:
            file.write(line + "\n")


def failing(seed: int, level: float) -> dict[str, float]:
    if seed == 1 and level == 2.0:
        raise ValueError("no such level")
    return {"height": level}


def dying(seed: int) -> dict[str, float]:
    sys.exit(3)


def noisy(seed: int) -> dict[str, float]:
    print("this is not an answer")
    return {"height": 1.0, "width": 2.0}


def differences(cells: Cells) -> Cells:
    return {"two over one": {"height": cells["two"]["height"] - cells["one"]["height"]}}


def levels(seeds: int = 3, **settings: object) -> Study:
    """Three levels, of which the third never gets there."""
    return Study(
        name="levels",
        about="Levels with noise.",
        measure=measure,
        cases={label: {"level": level, **settings} for label, level in (("one", 1.0), ("two", 2.0), ("three", 3.0))},
        quantities={
            "height": MeasuredQuantity("how high"),
            "never": MeasuredQuantity("steps to a goal that some never reach"),
            "seconds": MeasuredQuantity("a time", of_machine=True),
        },
        seeds=seeds,
        derive=differences,
        expect={
            "two is higher than one": lambda c: c["two"]["height"] > c["one"]["height"],
            "one is higher than two": lambda c: c["one"]["height"] > c["two"]["height"],
            "four is highest": lambda c: c["four"]["height"] > c["two"]["height"],
        },
        plots=[
            StudyPlot("height", "Height <by> level", x="level", y="height"),
            StudyPlot("never", "Never", y="never", log_y=True),
        ],
    )


def main() -> None:
    """Runs `levels` in a folder with so many seeds, its cells taking so many seconds."""
    from thrifty.experiments.study_runner import run_study  # not at the top: a worker has no use for it

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is started with it ignored
    folder = Path(sys.argv[1])
    study = levels(seeds=int(sys.argv[2]), log=str(folder.parent / "log"), seconds=float(sys.argv[3]))
    run_study(study, folder, jobs=2)


PLACE = {"cpu": "abacus", "torch": "2", "python": "3", "command": ["thrifty", "study", "levels"]}


def result(seeds: int = 4, shift: float = 0.0, seconds: float = 1.0, never: tuple[int, ...] = ()) -> StudyResult:
    """Numbers 1, 2, 3 plus a spread over the seeds; `never` are seeds at which case two does not get there."""
    found = StudyResult(levels(seeds=seeds), PLACE)
    for label, level in (("one", 1.0), ("two", 2.0), ("three", 3.0)):
        for seed in range(seeds):
            goal = math.inf if label == "three" or (label == "two" and seed in never) else 7.0
            numbers = {"height": level + shift + 0.01 * seed, "never": goal, "seconds": seconds}
            found.cells[label, seed] = StudyCell(numbers, 1.0)
    return found
