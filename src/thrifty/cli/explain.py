"""`thrifty explain`: show the effect of each technique of a recipe before training."""

from typing import Any

import click

from thrifty.cli.recipe_options import announce, build_recipe, recipe_options, run_options
from thrifty.cli.verb_output import print_result


@click.command()
@recipe_options
@run_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(as_json: bool, **options: Any) -> None:
    """Explain RECIPE without training it. Prints the techniques in order of stage. For each technique, it prints the
    changed modules, and memory and FLOPs before and after the technique. It also prints refusals with reasons, and the
    origin of every value that is not a default.

    With a mesh, such as --mesh tensor=2,replicate=2, it also prints the memory, computation and communication of each
    rank. No ranks are started. The exit code is 2 if a technique is refused.
    """
    import thrifty

    layers = announce(build_recipe(**options))
    print_result(thrifty.explain(layers.recipe(), origins=layers.changed()), as_json)
