"""`thrifty resume`: resume a run from its newest checkpoint."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import HELD_OUT, LOSS, MESH, MODEL_ARGUMENTS, OWN_MODEL, RANKS, announce


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="PATH=VALUE",
    help="Change a value of the recipe; most changes need --fork.",
)
@click.option("--with", "additions", multiple=True, metavar="NAME:KEY=VALUE,…", help="Add a technique; needs --fork.")
@MESH
@click.option("--without", "removals", multiple=True, metavar="NAME", help="Remove a technique; needs --fork.")
@click.option("--budget", metavar="+AMOUNT", help="Train longer: +500steps, +1e7tokens, +3epochs, +90s, +10min or +2h.")
@click.option("--fork", metavar="NAME", help="Continue as a new run NAME with the changed recipe.")
@click.option("--drop-weights", is_flag=True, help="With --fork: drop weights that the new recipe does not contain.")
@OWN_MODEL
@click.option("--data", metavar="PACKAGE.MODULE:NAME", help="Your own dataset, if the run used it.")
@HELD_OUT
@LOSS
@MODEL_ARGUMENTS
@RANKS
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON at the end.")
def command(
    run: Path,
    assignments: tuple[str, ...],
    additions: tuple[str, ...],
    removals: tuple[str, ...],
    mesh: str | None,
    model: str | None,
    data: str | None,
    held_out: str | None,
    loss: str | None,
    model_arguments: tuple[str, ...],
    ranks: int,
    budget: str | None,
    fork: str | None,
    drop_weights: bool,
    quiet: bool,
    as_json: bool,
) -> Any:
    """Resume RUN (a run folder, or its name under runs/) from its newest undamaged checkpoint."""
    import thrifty
    from thrifty.cli.verb_output import finished_run, loading, print_result

    with loading(quiet):
        from thrifty.interface.recipe_arguments import stored_layers
    layers = stored_layers(run)
    layers.apply_objects(data, held_out, loss)
    layers.apply_model(model, model_arguments)
    announce(layers.apply_changes(removals, additions, assignments), quiet)
    if mesh is not None:
        layers.apply_mesh(mesh)
    origins = {where: origin for where, origin in layers.origins.items() if origin.startswith("--")}
    options: dict[str, Any] = {
        "budget": budget,
        "fork": fork,
        "drop_weights": drop_weights,
        "ranks": ranks,
        "origins": origins,
    }
    resumed = finished_run(lambda: thrifty.resume(run, recipe=layers.recipe(), quiet=quiet, **options))
    print_result(resumed, as_json, quiet)
