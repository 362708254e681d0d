"""A probe's process, or one of its ranks: reads a job from a file, runs steps of its recipe, answers beside it."""

import json
import sys
from pathlib import Path


def main(asked: Path) -> None:
    from thrifty.core.errors import ThriftyError
    from thrifty.core.ranks import rank
    from thrifty.planning.probe_jobs import answer
    from thrifty.training.run_setup import ranked

    try:
        with ranked():
            try:
                found = _timed(json.loads(asked.read_text(encoding="utf-8")))
            except Exception as error:  # told before the other ranks find out that this one is lost
                what = error.what if isinstance(error, ThriftyError) else f"{type(error).__name__}: {error}"
                answer(asked, {"refused": what or type(error).__name__})
                raise
            if rank() == 0:
                answer(asked, found)
    except ThriftyError as error:
        answer(asked, {"refused": error.what})
        sys.exit(error.what)


def _timed(job: dict) -> dict:
    from thrifty.cli.plan.user_model import own_model
    from thrifty.planning.step_timing import timed
    from thrifty.recipes.recipe_toml import recipe_from_data
    from thrifty.training.determinism import same_bits
    from thrifty.training.memory_meter import placing_freed
    from thrifty.training.run_setup import prepare

    recipe = recipe_from_data(job["recipe"] | {"name": "probe"})
    model = own_model(job["model"]).build if job["model"] else None
    prepared = prepare(recipe, model, steps=job["steps"], quiet=True)
    held_out = list(prepared.data.held_out.batches(recipe.evaluation.examples, recipe.data.batch))
    with placing_freed(prepared.run), same_bits(prepared.run.device, recipe.deterministic):  # as a run does
        return timed(prepared.run, job["rows"], job["parts"], held_out, job["seconds"], job["bar"]).as_dict()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
