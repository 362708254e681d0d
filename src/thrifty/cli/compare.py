"""`thrifty compare`: variants against a baseline at equal budget, over several seeds, with a verdict."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import build_recipe, recipe_options

PROTOCOL = ("equal_budget", "seeds", "rate_trials", "rate_factor", "min_effect", "warmup_steps")
"""Options that say how variants are compared, by their names; the others are of the baseline."""


@click.command()
@recipe_options
@click.option(
    "--variant",
    "variants",
    metavar="[NAME:] CHANGES",
    multiple=True,
    help="A recipe, or changes of RECIPE by --with, --without and --set; may be given several times.",
)
@click.option(
    "--equal-budget",
    type=click.Choice(["time", "flops", "tokens", "steps"]),
    help="What every variant may spend of.  [default: time]",
)
@click.option("--seeds", type=int, help="Pairs of runs.  [default: 8]")
@click.option("--rate-trials", type=int, help="Learning rates tried for each variant; 1 for none.  [default: 3]")
@click.option("--rate-factor", type=float, help="Between a learning rate and the next.  [default: 2]")
@click.option(
    "--min-effect",
    type=float,
    help="Smallest difference worth knowing, as a share of the loss.  [default: 0.01]",
)
@click.option("--warmup-steps", type=int, help="Steps in which costs are measured.  [default: 24]")
@click.option(
    "--worker",
    "workers",
    metavar="COMMAND",
    multiple=True,
    help="Where runs are executed; given several times, side by side: here, or a command that starts a run on another "
    "machine.  [default: here]",
)
@click.option("--runs", type=click.Path(path_type=Path), default=Path("runs"), help="Where its folder is kept.")
@click.option("--save-result", type=click.Path(path_type=Path), help="Keep the result as this .json file too.")
@click.option("--retry", is_flag=True, help="Run again what failed.")
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
    """Compare variants with RECIPE, the baseline, at equal budget. A variant is another recipe, or changes of the
    baseline, quoted and spelled as for thrifty train:

    \b
        thrifty compare kjv --variant "--with growth.stacking"
        thrifty compare kjv --variant "lion: --without optimizers.adamw --with optimizers.lion:lr=2e-4"
        thrifty compare plain --variant "planned: plan.toml" --variant "--set data.batch=16"

    A name and a colon before the changes is what a variant is called. Changes outside the quotes (--data, --with,
    --set, …) are of the baseline and all its variants. Pilots measure what a step of each variant costs, every variant
    is tried at the same number of learning rates, and each seed is run with every variant in turn. The verdict is by
    held-out loss, of all planned pairs together. An interrupted comparison resumes where it stopped.
    """
    import thrifty
    from thrifty.cli.verb_output import print_result
    from thrifty.recipes.typed_variants import read_variants

    protocol: Any = {option: value for option in PROTOCOL if (value := options.pop(option)) is not None}
    result = thrifty.compare(
        build_recipe(recipe, **options).recipe(),
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
