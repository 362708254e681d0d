"""`thrifty check`: does a recipe's combination of techniques still compute what it promises?"""

from typing import Any

import click

from thrifty.cli.recipe_options import build_recipe, recipe_options
from thrifty.cli.verb_output import print_result


@click.command()
@recipe_options
@click.option("--steps", type=click.IntRange(min=3), default=4, show_default=True, help="Steps that are trained.")
@click.option("--examples", type=click.IntRange(min=2), default=4, show_default=True, help="Of an effective batch.")
@click.option("--length", type=click.IntRange(min=2), help="Tokens of an example, if fewer than the recipe's.")
@click.option("--ranks/--no-ranks", default=True, help="Whether to start processes where the recipe has a mesh.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(steps: int, examples: int, length: int | None, ranks: bool, as_json: bool, **options: Any) -> None:
    """Check RECIPE before it costs anything: a few steps of its own model on its own data, against the plain run.

    Values where they are promised, gradients that reach every parameter, micro-batches against one big batch, ranks
    against one process, resuming, export, and which tokens are learned. The exit code is 4 if a promise is broken.
    """
    import thrifty

    recipe = build_recipe(**options).recipe()
    report = thrifty.check(recipe, steps=steps, examples=examples, length=length, ranks=ranks, quiet=as_json)
    print_result(report, as_json)
