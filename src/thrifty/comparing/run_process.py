"""Process that executes one run of a comparison until the run ends or a signal arrives.

A task file, the first argument of the process, describes the run. If standard input closes, the parent process has
stopped the run or died. The run then saves a checkpoint and exits, as after SIGTERM, so that it never continues
unnoticed.
"""

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from thrifty.comparing.step_counting import count_run
from thrifty.core.errors import STARTED, IntegrityError, ThriftyError
from thrifty.core.recipe import Recipe
from thrifty.recipes.recipe_toml import recipe_from_data
from thrifty.training.rank_launch import end_with_starter
from thrifty.training.run_folder import RunFolder
from thrifty.training.sent_objects import read_value
from thrifty.training.trainer import resume, train

NUMBER = re.compile(r"-(pilot|trial|seed)-\d+$")
"""Pattern of the end of a run's name, in place of which counted facts have `COUNT`."""
COUNT = "-count"


def summary_of(path: Path) -> dict[str, Any]:
    """Return a run's summary; {} if there is none."""
    return _read(path, "summary")


def run_to_end(recipe: Recipe, runs: Path) -> dict[str, Any]:
    """Start or resume a run and return its summary. A finished run does not run again."""
    path = runs / recipe.name
    summary = summary_of(path)
    if summary.get("status") == "finished":
        return summary
    if (path / "recipe.toml").is_file():
        return resume(path, recipe, quiet=True)
    return train(recipe, runs, quiet=True, counted=_read(runs, NUMBER.sub(COUNT, recipe.name)))


def _read(path: Path, name: str) -> dict[str, Any]:
    with suppress(IntegrityError):
        return RunFolder(path).read_json(name)
    return {}


def ending_of(recipe: Recipe, runs: Path, is_counted: bool) -> dict[str, Any]:
    """Run a recipe to its end, or count a step if `is_counted`. Return "exit_code", "error" with the message of a
    failed run, and "cost" of a counted step."""
    try:
        if is_counted:
            return {"exit_code": 0, "error": "", "cost": asdict(count_run(recipe, runs))}
        return {"exit_code": run_to_end(recipe, runs)["exit_code"], "error": ""}
    except ThriftyError as failed:
        return {"exit_code": failed.exit_code, "error": str(failed)}
    except Exception as failed:  # any technique may fail: the comparison lists the run and continues
        traceback.print_exc()
        return {"exit_code": 1, "error": f"{type(failed).__name__}: {failed}"}


def read_exit(task: Path) -> dict[str, Any]:
    """Return the ending that the process of a task file wrote; {} if the process wrote nothing."""
    with suppress(OSError, ValueError):
        return json.loads(task.with_suffix(".end").read_text())
    return {}


def serve(arguments: Sequence[str]) -> int:
    """Run the task of the arguments: the task file, and the file of the recipe's objects if it has some. Return the
    exit code. The code is also written to a file next to the task file, because a launcher such as srun may return a
    different code.
    """
    os.environ[STARTED] = str(time.monotonic())  # not the start of the command that starts all runs
    task, *objects = map(Path, arguments)
    content = json.loads(task.read_text())
    os.chdir(content["folder"])
    end_with_starter()
    recipe = recipe_from_data(content["recipe"])
    try:
        recipe = replace(recipe, objects=read_value(objects[0])) if objects else recipe
        ending = ending_of(recipe, Path(content["runs"]), content["is_counted"])
    except ThriftyError as failed:  # the import of the user's script
        ending = {"exit_code": failed.exit_code, "error": str(failed)}
    if os.environ.get("RANK", "0") == "0":
        task.with_suffix(".end").write_text(json.dumps(ending))
    return ending["exit_code"]


if __name__ == "__main__":
    code = serve(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # a normal exit would wait for the thread that watches standard input
