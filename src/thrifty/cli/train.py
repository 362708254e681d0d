"""`thrifty train`: from a recipe to a run folder."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import RANKS, build_recipe, recipe_options


@click.command()
@recipe_options
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"), help="Where run folders are kept.")
@RANKS
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON at the end.")
def command(runs: Path, ranks: int, quiet: bool, as_json: bool, **chosen: Any) -> None:
    """Train by RECIPE: the name of a recipe (`thrifty list recipes`) or a TOML file. Default: text;
    around a --model, --data or --loss of your own that of `thrifty.train` in Python.

    The run is kept in runs/NAME; a name that exists is refused, never overwritten.
    """
    import thrifty
    from thrifty.cli.verb_output import print_result, run_of

    layers = build_recipe(**chosen)
    options = {"ranks": ranks, "runs": runs, "origins": layers.changed(), "quiet": quiet}
    run = run_of(lambda: thrifty.train(recipe=layers.recipe(), **options))
    print_result(run, as_json, quiet)
