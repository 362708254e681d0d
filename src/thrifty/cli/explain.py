"""`thrifty explain`: show what a recipe will do, stage by stage, before it runs."""

from typing import Any

import click

from thrifty.cli.recipe_options import build_recipe, recipe_options
from thrifty.cli.verb_output import print_result


@click.command()
@recipe_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(as_json: bool, **options: Any) -> None:
    """Show what RECIPE will do, without training: techniques in order of stage, the modules that each changes, memory
    and FLOPs before and after, refusals with reasons, and the origin of every value that is not a default.

    With a mesh, such as --mesh tensor=2,replicate=2, it shows what each rank holds, computes and sends, without
    starting ranks. The exit code is 2 if a technique is refused.
    """
    import thrifty

    layers = build_recipe(**options)
    print_result(thrifty.explain(layers.recipe(), origins=layers.changed()), as_json)
