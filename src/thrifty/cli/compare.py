"""`thrifty compare`: train variants and a baseline at an equal budget, and report a verdict."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import announce, build_recipe, recipe_options, run_options

PROTOCOL = ("equal_budget", "seeds", "rate_trials", "rate_factor", "min_effect", "warmup_steps")
"""Options of the comparison; all other options change the baseline."""


@click.command()
@recipe_options
@run_options
@click.option(
    "--variant",
    "variants",
    metavar="[NAME:] CHANGES",
    multiple=True,
    help="A recipe, or changes of RECIPE by --with, --without and --set. Repeatable.",
)
@click.option(
    "--equal-budget",
    type=click.Choice(["time", "flops", "tokens", "steps"]),
    help="Budget that all variants share.  [default: time]",
)
@click.option("--seeds", type=int, help="Number of pairs of runs.  [default: 8]")
@click.option("--rate-trials", type=int, help="Learning rates per variant; 1: no search.  [default: 3]")
@click.option("--rate-factor", type=float, help="Ratio of neighboring learning rates.  [default: 2]")
@click.option(
    "--min-effect", type=float, help="Smallest relevant difference, as a fraction of the loss.  [default: 0.01]"
)
@click.option("--warmup-steps", type=int, help="Steps of each pilot, at equal time.  [default: 24]")
@click.option(
    "--worker",
    "workers",
    metavar="COMMAND",
    multiple=True,
    help="Machine for runs: here, or a command that starts a run on another machine. Several workers run in "
    "parallel.  [default: here]",
)
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"), help="Parent folder.  [default: runs]")
@click.option("--save-result", type=click.Path(path_type=Path), help="Also write the result to this .json file.")
@click.option("--retry", is_flag=True, help="Repeat failed runs.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON at the end.")
def command(
    recipe: str | None,
    variants: tuple[str, ...],
    name: str | None,
    workers: tuple[str, ...],
    runs: Path,
    save_result: Path | None,
    retry: bool,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare variants with the baseline RECIPE at an equal budget. A variant is another recipe, or quoted --with,
    --without and --set that change the baseline:

    \b
        thrifty compare kjv --variant "--with growth.stacking"
        thrifty compare kjv --variant "lion: --with optimizers.lion:lr=2e-4"
        thrifty compare plain --variant "planned: plan.toml" --variant "--set data.batch=16"

    A word and a colon before the changes name the variant. Options outside the quotes (--data, --with, --set, …) change
    the baseline and all variants. A step of each variant is counted before the runs. At equal time, each run adapts
    its number of steps to the machine. Every variant tries the same number of learning rates. Each seed is run with
    every variant. The verdict compares the held-out losses of all planned pairs. The same command resumes an
    interrupted comparison.
    """
    import thrifty
    from thrifty.cli.verb_output import print_result
    from thrifty.recipes.typed_variants import read_variants

    protocol: Any = {option: value for option in PROTOCOL if (value := options.pop(option)) is not None}
    result = thrifty.compare(
        announce(build_recipe(recipe, **options), quiet).recipe(),
        read_variants(variants, lambda other: build_recipe(other, **options).recipe()),
        name=name,
        workers=workers,
        runs=runs,
        save_result=save_result,
        retry=retry,
        quiet=quiet,
        **protocol,
    )
    print_result(result, as_json, quiet)
