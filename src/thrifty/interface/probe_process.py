"""Process of a probe, or of one of its ranks: read a job file, time its steps, write the result to the same folder."""

import json
import sys
from dataclasses import replace
from pathlib import Path


def main(job_file: Path) -> None:
    from thrifty.core.errors import ThriftyError
    from thrifty.core.out_of_memory import explain_out_of_memory
    from thrifty.core.ranks import rank
    from thrifty.planning.probe_jobs import write_probe_answer
    from thrifty.training.rank_setup import process_group

    try:
        with process_group():
            try:
                with explain_out_of_memory():
                    timing = _timed(job_file)
            except Exception as error:  # reported before other ranks fail because this rank is gone
                what = error.what if isinstance(error, ThriftyError) else f"{type(error).__name__}: {error}"
                write_probe_answer(job_file, {"refused": what or type(error).__name__})
                raise
            if rank() == 0:
                write_probe_answer(job_file, timing)
    except ThriftyError as error:
        write_probe_answer(job_file, {"refused": error.what})
        sys.exit(error.what)


def _timed(job_file: Path) -> dict:
    from thrifty.planning.probe_jobs import objects_file
    from thrifty.planning.step_timing import time_steps
    from thrifty.recipes.recipe_toml import recipe_from_data
    from thrifty.training.determinism import deterministic_kernels
    from thrifty.training.memory_meter import set_freed_memory_policy
    from thrifty.training.run_setup import prepare_run
    from thrifty.training.sent_objects import read_value

    job, objects = json.loads(job_file.read_text(encoding="utf-8")), read_value(objects_file(job_file))
    recipe = replace(recipe_from_data(job["recipe"] | {"name": "probe"}), objects=objects)
    prepared = prepare_run(recipe, steps=job["steps"], quiet=True)
    settings = recipe.evaluation
    held_out = list(prepared.data.held_out.batches(settings.examples, settings.batch or recipe.data.batch))
    with (
        set_freed_memory_policy(prepared.run),
        deterministic_kernels(prepared.run.device, recipe.deterministic),
    ):  # the same settings as in a run
        return time_steps(prepared.run, job["rows"], job["parts"], held_out, job["seconds"], job["bar"]).as_dict()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
