"""`thrifty lottery`: lottery tickets, round after round; or the masks of a sparse run as a ticket."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import build_recipe, read_moment, recipe_options
from thrifty.cli.verb_output import print_result


@click.command()
@recipe_options
@click.option("--rounds", type=click.IntRange(min=1), help="Tickets drawn after the dense run.  [default: 8]")
@click.option(
    "--prune-fraction",
    "prune",
    type=float,
    help="Share of the weights left that goes after each round.  [default: 0.2]",
)
@click.option("--rewind", metavar="STEP|SHARE", help="What tickets start from: 0, a step, or 0.01 of the run.")
@click.option("--scope", type=click.Choice(["global", "layerwise"]), help="What is compared.  [default: global]")
@click.option("--where", metavar="PATTERN", help="Names of the matrices that are pruned.  [default: of blocks]")
@click.option(
    "--half-rate", "half", metavar="PATTERN", help="Names of those that lose half the share.  [default: of heads]"
)
@click.option(
    "--control",
    "controls",
    multiple=True,
    type=click.Choice(["random-mask", "reinitialise"]),
    help="Train this of each ticket, too.",
)
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"), help="Where run folders are kept.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--json", "as_json", is_flag=True, help="Print all rounds as JSON at the end.")
def command(
    rounds: int | None,
    prune: float | None,
    rewind: str | None,
    scope: str | None,
    where: str | None,
    half: str | None,
    controls: tuple[str, ...],
    runs: Path,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Train RECIPE, cut the smallest weights, start again from the first values (or an early step) with those that are
    left, and so on. Every round is a run of its own, runs/NAME-round-R.

    Killed or stopped, the same command resumes it; with more --rounds or another --control it adds those.
    """
    import thrifty

    values = {"rounds": rounds, "prune_fraction": prune, "scope": scope, "where": where, "half_rate": half}
    moment = read_moment("--rewind", rewind, "give a step, such as 50, or a share of the run") if rewind else None
    values |= {"rewind": moment, "controls": controls or None}
    settings: Any = {name: value for name, value in values.items() if value is not None}
    layers = build_recipe(**options)
    result = thrifty.lottery(layers.recipe(), runs=runs, origins=layers.changed(), quiet=quiet, **settings)
    print_result(result, as_json, quiet)
