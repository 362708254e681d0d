"""A probe's process: reads a job as JSON, runs whole steps of its recipe, and writes their timing as JSON."""

import json
import sys


def main() -> None:
    from thrifty.cli.plan_model import own_model
    from thrifty.core.errors import ThriftyError
    from thrifty.planning.probing import timed
    from thrifty.preparing import prepare
    from thrifty.recipes.toml import recipe_from_data
    from thrifty.training.memory import keeping_freed
    from thrifty.training.same_bits import same_bits

    job = json.load(sys.stdin)
    try:
        recipe = recipe_from_data(job["recipe"] | {"name": "probe"})
        model = own_model(job["model"]).build if job["model"] else None
        prepared = prepare(recipe, model, steps=job["steps"], quiet=True)
        held_out = list(prepared.data.held_out.batches(recipe.evaluation.examples, recipe.data.batch))
        device = prepared.run.device
        with keeping_freed(device), same_bits(device, recipe.deterministic):  # as a run does
            timing = timed(prepared.run, job["rows"], job["parts"], held_out, job["seconds"], job["bar"])
    except ThriftyError as error:
        sys.exit(error.what)
    print(json.dumps(timing.as_dict()))


if __name__ == "__main__":
    main()
