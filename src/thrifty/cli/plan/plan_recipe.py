"""`thrifty plan RECIPE`: choose techniques that fit a budget."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import announce, build_recipe, recipe_options, run_options
from thrifty.cli.verb_output import print_result
from thrifty.core.errors import UsageError

ALLOWED = ("exact", "rounding", "different")
OTHERS = ("size", "fit")
"""Other commands of `plan`."""
EXPORTS = ("accelerate", "deepspeed", "torchtitan", "script")
WANTED = ("memory", "disk", "hours", "tokens", "flops", "allow", "price_per_hour")
"""Options that limit a plan."""
PAGES = Path("runs") / "plans"
"""Folder of the pages of plans without --out."""
PROBING = ("probe", "probe_seconds", "probed_candidates", "seconds")
"""Options that apply only if candidates are timed."""


@click.command(name="recipe")
@recipe_options
@run_options
@click.option(
    "--memory",
    metavar="SIZE",
    help="Memory limit per rank (CPU: whole process), such as 16GiB.  [default: free memory]",
)
@click.option("--disk", metavar="SIZE", help="Disk limit for checkpoints and prepared data.")
@click.option("--hours", type=float, help="Training time; with --tokens or --flops, an upper limit.")
@click.option("--tokens", type=float, help="Number of training tokens.")
@click.option("--flops", type=float, help="Compute budget: FLOPs of the model without techniques.")
@click.option(
    "--allow",
    type=click.Choice(ALLOWED),
    help="Largest change of numerical values that techniques may make.  [default: exact; several ranks: rounding]",
)
@click.option("--price-per-hour", type=float, help="Price of this machine per hour, to print the cost.")
@click.option("--probe/--no-probe", default=None, help="Time the best candidates, or only predict.  [default: probe]")
@click.option("--probe-seconds", type=float, help="Seconds to time one candidate.  [default: 20]")
@click.option("--probed-candidates", type=click.IntRange(1), help="Number of candidates to time.  [default: 4]")
@click.option(
    "--seconds",
    type=click.FloatRange(0),
    help="Time limit of planning in seconds.  [default: a fifth of the run, at least 60]",
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
@click.option("--all", "is_whole", is_flag=True, help="Print all candidates, and the reason for every technique.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def plan_recipe(
    recipe: str | None,
    out: Path | None,
    exports: tuple[str, ...],
    is_whole: bool,
    as_json: bool,
    cluster: str | None,
    ranks: int | None,
    **options: Any,
) -> None:
    """Choose techniques for RECIPE that fit a budget. Predict the memory of candidate recipes, then time the best
    candidates.

    Prints the changes of the recipe, the forecast with intervals, and near alternatives; --all prints the rest. The
    best plan may change nothing. The exit code is 3 if no recipe fits.
    """
    import thrifty
    from thrifty.interface.plan_exports import export_path
    from thrifty.interface.plans import units_of

    if out is not None and out.exists():
        raise UsageError(f"{str(out)!r} exists already", fix="remove it; or --out other.toml")
    if exports and out is None:
        raise UsageError("--export requires --out and writes to the same folder", fix="--out plan.toml")
    wanted: Any = {name: options.pop(name) for name in WANTED}
    probing: Any = {name: value for name in PROBING if (value := options.pop(name)) is not None}
    _refuse_misspelled_command(recipe or "")
    if cluster is not None and exports:
        raise UsageError(
            "--export does not support cluster plans",
            fix="write the plan with --out PLAN.toml, then thrifty plan PLAN.toml --export without --cluster",
        )
    with units_of(cluster):
        chosen = announce(build_recipe(recipe, **options), as_json).recipe()
    if chosen.model.build and "script" in exports:
        raise UsageError(
            f"--export script requires a preset, but {chosen.model.build!r} is your own model",
            fix="leave out --export script; the other exports work",
        )
    plan = thrifty.plan(chosen, cluster=cluster, ranks=ranks, quiet=as_json, **wanted, **probing)
    try:
        if out is not None:
            plan.write(out)
            for name in exports:
                plan.export(name, export_path(name, out))  # type: ignore[arg-type]
        if not as_json:
            plan.write_page(out.with_suffix(".html") if out else PAGES / f"{chosen.name}.html")
    finally:  # print the plan even if an export fails, because planning takes minutes
        print_result(plan.everything() if is_whole else plan, as_json)


def _refuse_misspelled_command(word: str) -> None:
    """Raise UsageError if a word is not a recipe but similar to the name of another command of `plan`."""
    from difflib import get_close_matches

    from thrifty.recipes import RECIPES

    near = get_close_matches(word, OTHERS, n=1)
    if near and word not in RECIPES and not Path(word).exists():
        raise UsageError(f"there is no recipe {word!r}", fix=f"did you mean {near[0]!r}?")
