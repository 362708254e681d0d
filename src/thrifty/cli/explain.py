"""`thrifty explain`: what a recipe will do, stage by stage, before it runs."""

from typing import Any

import click

from thrifty.cli.recipe_options import build_recipe, recipe_options
from thrifty.cli.verb_output import print_result


@click.command()
@recipe_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(as_json: bool, **options: Any) -> None:
    """Show what RECIPE will do: each technique in order of stage, what it touches, memory and work before and after
    it, what is refused and why, and where every value that is not a default came from. Nothing is trained.

    With a mesh, such as --mesh tensor=2,replicate=2, it is what each rank will hold, compute and send; no ranks are
    started. The exit code is 2 where a technique is refused."""
    import thrifty

    layers = build_recipe(**options)
    print_result(thrifty.explain(layers.recipe(), origins=layers.changed()), as_json)
