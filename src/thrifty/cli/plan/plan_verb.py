"""`thrifty plan`: choose techniques for a budget, or a model size by scaling laws."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.plan.plan_recipe import plan_recipe
from thrifty.cli.verb_output import print_result


class PlanGroup(click.Group):
    """A click group whose default command plans a recipe."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *self.get_help_option_names(ctx)}:
            args = [OF_RECIPE, *args]
        return super().parse_args(ctx, args)


OF_RECIPE = "recipe"


@click.group(name="plan", cls=PlanGroup)
def command() -> None:
    """Choose techniques for a budget, or a model size.

    thrifty plan RECIPE --memory 2GB --hours 1 --out plan.toml plans a recipe (help: thrifty plan recipe --help). The
    commands size and fit choose a model size for a compute budget.
    """


command.add_command(plan_recipe, OF_RECIPE)


@command.command()
@click.option("--flops", type=float, help="Compute budget, such as 1e18.")
@click.option("--hours", type=float, help="Training hours on this machine; its speed is measured.")
@click.option("--tokens", type=float, help="Number of training tokens. Prints the model size.")
@click.option(
    "--utilisation", type=float, default=0.4, show_default=True, help="With --hours: assumed fraction of peak FLOP/s."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def size(flops: float | None, hours: float | None, tokens: float | None, utilisation: float, as_json: bool) -> None:
    """Print compute-optimal parameters and tokens for each published set of constants."""
    import thrifty

    sizes = thrifty.recommend_size(flops=flops, hours=hours, tokens=tokens, utilisation=utilisation)
    print_result(sizes, as_json)


@command.command()
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path))
@click.option("--csv", "table", type=click.Path(path_type=Path), help="Table with the columns parameters,tokens,loss.")
@click.option("--flops", type=float, help="Also print the best sizes for this compute budget.")
@click.option("--drop-worst", type=click.IntRange(0), default=0, help="Number of runs with the highest loss to drop.")
@click.option("--all-starts", is_flag=True, help="Fit from the paper's 4500 starting points instead of 243.")
@click.option("--resamples", type=click.IntRange(2), default=400, show_default=True, help="Number of bootstrap fits.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the bootstrap.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def fit(runs: tuple[Path, ...], as_json: bool, **options: Any) -> None:
    """Fit a scaling law to RUNS (run folders, or names under runs/) or to a table, with 95 % intervals.

    All runs must be finished, and differ in model size and in tokens.
    """
    import thrifty

    print_result(thrifty.fit_scaling_law(runs, **options), as_json)
