"""`thrifty lottery`: lottery tickets, round after round; or the masks of a sparse run as a ticket."""

import sys
from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import build_recipe, read_moment, recipe_options
from thrifty.cli.verb_output import print_result, progress


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

    Killed or stopped, the same command goes on where it was; with more --rounds or another --control it adds those.
    """
    from thrifty.core.plain_values import build
    from thrifty.experiments.lottery_rounds import LotterySettings, run_lottery

    values = {"rounds": rounds, "prune": prune, "scope": scope, "where": where, "half": half}
    moment = read_moment("--rewind", rewind, "give a step, such as 50, or a share of the run") if rewind else None
    values |= {"rewind": moment, "controls": controls or None}
    lottery = build(LotterySettings, {name: value for name, value in values.items() if value is not None}, "lottery")
    layers = build_recipe(**options)
    say, origins = progress(quiet), layers.changed()
    result = run_lottery(layers.recipe(), lottery, runs, origins=origins, quiet=quiet, say=say)
    print_result(result, lambda: table(result), as_json, quiet)
    sys.exit(result["exit_code"])


def table(result: dict[str, Any]) -> str:
    """Held-out losses, a line for each round."""
    kinds = list(dict.fromkeys(kind for each in result["rounds"] for kind in each["runs"]))
    lines = [f"{'round':>5}  {'density':>8}" + "".join(f"  {kind:>12}" for kind in kinds)]
    for each in result["rounds"]:
        losses = [each["runs"].get(kind, {}).get("held_out_loss") for kind in kinds]
        shown = ["" if loss is None else f"{loss:.4f}" for loss in losses]
        lines.append(f"{each['round']:>5}  {each['density']:>8.4f}" + "".join(f"  {loss:>12}" for loss in shown))
    return "\n".join([*lines, f"held-out losses; all of it in {result['folder']}/lottery.json"])
