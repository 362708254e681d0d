"""`thrifty train`: train a recipe and store the run in a folder."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import RANKS, announce, build_recipe, recipe_options, run_options


@click.command()
@recipe_options
@run_options
@click.option(
    "--runs", type=click.Path(path_type=Path), default=Path("runs"), help="Parent of run folders.  [default: runs]"
)
@RANKS
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON at the end.")
def command(runs: Path, ranks: int, quiet: bool, as_json: bool, **chosen: Any) -> None:
    """Train RECIPE: a name (`thrifty list recipes`) or a TOML file. The default recipe is "text". With your own
    --model, --data or --loss, the default is the same as in `thrifty.train`.

    The run folder is runs/NAME. An existing folder is never overwritten: without --name, a number is added.
    """
    import thrifty
    from thrifty.cli.verb_output import finished_run, loading, print_result

    with loading(quiet):
        layers = build_recipe(**chosen)
    announce(layers, quiet)
    recipe, is_named = layers.recipe(), layers.origins.get("name", "").startswith("--")
    options = {"ranks": ranks, "runs": runs, "origins": layers.changed(), "quiet": quiet}
    run = finished_run(lambda: thrifty.train(recipe=recipe, name=recipe.name if is_named else None, **options))
    print_result(run, as_json, quiet)
