"""`thrifty plan RECIPE`: choose techniques for a budget."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import build_recipe, recipe_options
from thrifty.cli.verb_output import print_result
from thrifty.core.errors import UsageError

ALLOWED = ("exact", "rounding", "different")
OTHERS = ("size", "fit")
"""The other commands of `plan`."""
EXPORTS = ("accelerate", "deepspeed", "torchtitan", "script")
WANTED = ("memory", "disk", "hours", "tokens", "flops", "allow", "price_per_hour")
"""Limits of a plan."""
PROBING = ("probe", "probe_seconds", "probed_candidates", "seconds")
"""Options that apply only if steps are run."""


@click.command(name="recipe")
@recipe_options
@click.option(
    "--memory",
    metavar="SIZE",
    help="Memory limit of a rank, on a CPU of its process: 800MB, 16GiB.  [default: free memory]",
)
@click.option("--disk", metavar="SIZE", help="Disk limit of checkpoints and prepared data together.")
@click.option("--hours", type=float, help="Training time; with --tokens or --flops, an upper limit.")
@click.option("--tokens", type=float, help="Tokens to train on.")
@click.option("--flops", type=float, help="Compute budget in FLOPs of the plain model.")
@click.option(
    "--allow",
    type=click.Choice(ALLOWED),
    default="exact",
    show_default=True,
    help="Effect on computed values that techniques may have.",
)
@click.option("--price-per-hour", type=float, help="Price of one hour of this machine, to print the cost.")
@click.option(
    "--probe/--no-probe", default=None, help="Run steps of the best candidates, or only count.  [default: probe]"
)
@click.option("--probe-seconds", type=float, help="Time limit of one probe.  [default: 20]")
@click.option("--probed-candidates", type=click.IntRange(1), help="Number of candidates to run.  [default: 4]")
@click.option(
    "--seconds",
    type=click.FloatRange(0),
    help="Time limit of planning.  [default: a fifth of the run, at least 60]",
)
@click.option("--cluster", metavar="NAME|FILE", help="Plan for a simulated cluster.")
@click.option(
    "--ranks",
    type=click.IntRange(1),
    help="Number of devices of this machine or of the cluster.  [default: all of the cluster]",
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Write the planned recipe to this file, for thrifty train."
)
@click.option(
    "--export", "exports", type=click.Choice(EXPORTS), multiple=True, help="Also write the plan for another trainer."
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
    """Choose techniques for RECIPE under a budget: count the memory of candidates, then run the best of them.

    Prints the changes of the recipe, the forecast with intervals, the alternatives, and the reason for every technique.
    The best plan may change nothing. The exit code is 3 if nothing fits.
    """
    import thrifty
    from thrifty.interface.plan_exports import export_path
    from thrifty.interface.plans import units_of

    if out is not None and out.exists():
        raise UsageError(f"{str(out)!r} exists already", fix="name another file, or remove it")
    if exports and out is None:
        raise UsageError("--export requires --out, whose folder it writes to", fix="--out plan.toml")
    wanted: Any = {name: options.pop(name) for name in WANTED}
    probing: Any = {name: value for name in PROBING if (value := options.pop(name)) is not None}
    _refuse_misspelled_command(recipe or "")
    if cluster is not None and exports:
        raise UsageError(
            "--export works for plans of one device only",
            fix="write the plan with --out, and export it with thrifty plan PLAN.toml without --cluster",
        )
    with units_of(cluster):
        chosen = build_recipe(recipe, **options).recipe()
    if chosen.model.build and "script" in exports:
        raise UsageError(
            f"--export script requires a preset, and {chosen.model.build!r} is your own model",
            fix="leave out --export script; the other exports work",
        )
    plan = thrifty.plan(chosen, cluster=cluster, ranks=ranks, quiet=as_json, **wanted, **probing)
    try:
        if out is not None:
            plan.write(out)
            for name in exports:
                plan.export(name, export_path(name, out))  # type: ignore[arg-type]
    finally:  # print a plan that took minutes even if an export fails
        print_result(plan, as_json)


def _refuse_misspelled_command(word: str) -> None:
    """Raise UsageError for a word that is no recipe and nearly the name of another command of `plan`."""
    from difflib import get_close_matches

    from thrifty.recipes import RECIPES

    near = get_close_matches(word, OTHERS, n=1)
    if near and word not in RECIPES and not Path(word).exists():
        raise UsageError(f"there is no recipe {word!r}", fix=f"did you mean {near[0]!r}?")
