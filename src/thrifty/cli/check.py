"""`thrifty check`: test that a combination of techniques computes what it promises."""

from typing import Any

import click

from thrifty.cli.recipe_options import build_recipe, recipe_options
from thrifty.cli.verb_output import print_result


@click.command()
@recipe_options
@click.option("--steps", type=click.IntRange(min=3), default=4, show_default=True, help="Steps to train.")
@click.option(
    "--examples", type=click.IntRange(min=2), default=4, show_default=True, help="Examples in an effective batch."
)
@click.option("--length", type=click.IntRange(min=2), help="Tokens in an example, at most the recipe's.")
@click.option("--ranks/--no-ranks", default=True, help="Start one process per rank if the recipe has a mesh.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(steps: int, examples: int, length: int | None, ranks: bool, as_json: bool, **options: Any) -> None:
    """Check RECIPE before a long run: train its model on its data for a few steps and compare with the plain run.

    The check covers promised values, gradients of every parameter, micro-batches against one batch, ranks against one
    process, resume, export, and which tokens are learned. The exit code is 4 if a promise is broken.
    """
    import thrifty

    recipe = build_recipe(**options).recipe()
    report = thrifty.check(recipe, steps=steps, examples=examples, length=length, ranks=ranks, quiet=as_json)
    print_result(report, as_json)
