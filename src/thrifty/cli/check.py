"""`thrifty check`: test whether a recipe keeps the promises of its techniques."""

from typing import Any

import click

from thrifty.cli.recipe_options import build_recipe, recipe_options
from thrifty.cli.verb_output import print_result


@click.command()
@recipe_options
@click.option("--steps", type=click.IntRange(min=3), default=4, show_default=True, help="Number of steps.")
@click.option(
    "--examples", type=click.IntRange(min=2), default=4, show_default=True, help="Examples per effective batch."
)
@click.option("--length", type=click.IntRange(min=2), help="Tokens per example, at most the recipe's length.")
@click.option("--ranks/--no-ranks", default=True, help="Start one process per rank if the recipe has a mesh.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(steps: int, examples: int, length: int | None, ranks: bool, as_json: bool, **options: Any) -> None:
    """Check RECIPE before a long run. Train its model for a few steps and compare with the run without techniques.

    The check covers promised values, gradients of every parameter, micro-batches versus one batch, ranks versus one
    process, resume, export, and tokens with a loss. The exit code is 4 if a promise is broken.
    """
    import thrifty

    recipe = build_recipe(**options).recipe()
    report = thrifty.check(recipe, steps=steps, examples=examples, length=length, ranks=ranks, quiet=as_json)
    print_result(report, as_json)
