"""`thrifty plan RECIPE`: which techniques to switch on under a budget, and why not the rest."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import build_recipe, recipe_options
from thrifty.cli.verb_output import print_result
from thrifty.core.errors import UsageError

ALLOWED = ("exact", "rounding", "different")
OTHERS = ("size", "fit")
"""Commands beside this one."""
EXPORTS = ("accelerate", "deepspeed", "torchtitan", "script")
WANTED = ("memory", "disk", "hours", "tokens", "flops", "allow", "price_per_hour")
"""Options that say what is asked of a plan."""
PROBING = ("probe", "probe_seconds", "probed_candidates", "seconds")
"""Options that only apply when steps are run, or could be."""


@click.command(name="recipe")
@recipe_options
@click.option(
    "--memory",
    metavar="SIZE",
    help="Most a rank may hold, on a processor its process: 800MB, 16GiB.  [default: what is free]",
)
@click.option("--disk", metavar="SIZE", help="Most that checkpoints and prepared data may take together.")
@click.option(
    "--hours", type=float, help="The time to spend; beside --tokens or --flops, the longest that they may take."
)
@click.option("--tokens", type=float, help="The tokens to train on.")
@click.option("--flops", type=float, help="The compute to spend, by the FLOPs of the plain model.")
@click.option(
    "--allow", type=click.Choice(ALLOWED), default="exact", show_default=True, help="What may change of values."
)
@click.option("--price-per-hour", type=float, help="Of an hour of this machine, in any currency: also tells the cost.")
@click.option("--probe/--no-probe", default=None, help="Whether steps are run, or only counted.  [default: probe]")
@click.option("--probe-seconds", type=float, help="How long the steps of one probe may take.  [default: 20]")
@click.option("--probed-candidates", type=click.IntRange(1), help="Candidates that are run.  [default: 4]")
@click.option(
    "--seconds",
    type=click.FloatRange(0),
    help="How long planning may take.  [default: a fifth of the run's time, at least 60]",
)
@click.option("--cluster", metavar="NAME|FILE", help="Plan for a cluster that is not here, by simulation.")
@click.option("--ranks", type=click.IntRange(1), help="Devices: of this machine, or of the cluster, unless all of it.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the recipe here, ready for thrifty train.")
@click.option(
    "--export", "exports", type=click.Choice(EXPORTS), multiple=True, help="Also write it for another trainer."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def plan_recipe(
    recipe: str | None,
    out: Path | None,
    exports: tuple[str, ...],
    as_json: bool,
    cluster: str | None,
    ranks: int | None,
    **options: Any,
) -> None:
    """Choose techniques for RECIPE under a budget, by counting what candidates hold and running the best of them.

    Prints a recipe's changes, the forecast with intervals, the alternatives, and for every technique why it was taken
    or not. Changing nothing is an answer. Exit code 3 where nothing fits.
    """
    import thrifty
    from thrifty.interface.plan_exports import export_path
    from thrifty.interface.plans import units_of

    if out is not None and out.exists():
        raise UsageError(f"{out} is there already", fix="name another file, or remove it")
    if exports and out is None:
        raise UsageError("--export needs --out, beside which it writes", fix="--out plan.toml")
    wanted: Any = {name: options.pop(name) for name in WANTED}
    probing: Any = {name: value for name in PROBING if (value := options.pop(name)) is not None}
    _refuse_misspelled_command(recipe or "")
    if cluster is not None and exports:
        raise UsageError(
            "--export is for plans of one device",
            fix="write the plan with --out, and export it with thrifty plan PLAN.toml without --cluster",
        )
    with units_of(cluster):
        chosen = build_recipe(recipe, **options).recipe()
    if chosen.model.build and "script" in exports:
        raise UsageError(
            f"--export script writes a model of Thrifty's, and {chosen.model.build} is one of your own",
            fix="leave out --export script; the other exports work",
        )
    plan = thrifty.plan(chosen, cluster=cluster, ranks=ranks, quiet=as_json, **wanted, **probing)
    try:
        if out is not None:
            plan.write(out)
            for name in exports:
                plan.export(name, export_path(name, out))  # type: ignore[arg-type]
    finally:  # a plan that took minutes is told, whatever becomes of its exports
        print_result(plan, as_json)


def _refuse_misspelled_command(word: str) -> None:
    """Raises UsageError for what is no recipe and nearly the name of another kind of plan."""
    from difflib import get_close_matches

    from thrifty.recipes import RECIPES

    near = get_close_matches(word, OTHERS, n=1)
    if near and word not in RECIPES and not Path(word).exists():
        raise UsageError(f"there is no recipe {word!r}", fix=f"did you mean {near[0]!r}?")
