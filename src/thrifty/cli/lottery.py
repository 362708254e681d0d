"""`thrifty lottery`: find lottery tickets (sparse masks of an untrained network) by iterative magnitude pruning."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import announce, build_recipe, read_moment, recipe_options, run_options
from thrifty.cli.verb_output import print_result


@click.command()
@recipe_options
@run_options
@click.option("--rounds", type=click.IntRange(min=1), help="Pruning rounds after the dense run.  [default: 8]")
@click.option(
    "--prune-fraction",
    "prune",
    type=float,
    help="Fraction of the remaining weights to prune in each round.  [default: 0.2]",
)
@click.option(
    "--rewind",
    metavar="STEP|SHARE",
    help="Step to which weights are rewound: 0, a step, or a fraction such as 0.01.",
)
@click.option(
    "--scope",
    type=click.Choice(["global", "layerwise"]),
    help="Compare magnitudes over all matrices or within each matrix.  [default: global]",
)
@click.option("--where", metavar="PATTERN", help="Names of matrices to prune.  [default: all in blocks]")
@click.option(
    "--half-rate",
    "half",
    metavar="PATTERN",
    help="Names of matrices that are pruned by half the fraction.  [default: heads]",
)
@click.option(
    "--control",
    "controls",
    multiple=True,
    type=click.Choice(["random-mask", "reinitialise"]),
    help="Also train this control run for each ticket.",
)
@click.option(
    "--runs", type=click.Path(path_type=Path), default=Path("runs"), help="Parent of run folders.  [default: runs]"
)
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
    """Find lottery tickets: train RECIPE, prune the smallest weights, rewind the remaining weights, and repeat. Each
    round is a run folder, runs/NAME-round-R.

    Weights are rewound to their initial values or to an early step. The same command resumes an interrupted lottery,
    also with more --rounds or another --control.
    """
    import thrifty

    values = {"rounds": rounds, "prune_fraction": prune, "scope": scope, "where": where, "half_rate": half}
    moment = read_moment("--rewind", rewind, "--rewind 50; or --rewind 0.01 for a fraction") if rewind else None
    values |= {"rewind": moment, "controls": controls or None}
    settings: Any = {name: value for name, value in values.items() if value is not None}
    layers = announce(build_recipe(**options), quiet)
    result = thrifty.lottery(layers.recipe(), runs=runs, origins=layers.changed(), quiet=quiet, **settings)
    print_result(result, as_json, quiet)
