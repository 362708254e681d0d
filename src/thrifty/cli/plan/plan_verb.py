"""`thrifty plan`: which techniques to switch on, or what to train for a given compute by scaling laws."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.plan.plan_recipe import plan_recipe
from thrifty.cli.verb_output import print_result


class PlanGroup(click.Group):
    """What is none of its commands is the plan of a recipe, whose name or options stand first."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *self.get_help_option_names(ctx)}:
            args = [OF_RECIPE, *args]
        return super().parse_args(ctx, args)


OF_RECIPE = "recipe"


@click.group(name="plan", cls=PlanGroup)
def command() -> None:
    """Which techniques to switch on, or how large a model to train.

    thrifty plan RECIPE --memory 2GB --hours 1 --out plan.toml plans a recipe (thrifty plan recipe --help); the commands
    below say what size of model suits a compute budget.
    """


command.add_command(plan_recipe, OF_RECIPE)


@command.command()
@click.option("--flops", type=float, help="The compute to spend, such as 1e18.")
@click.option("--hours", type=float, help="The same by time on this machine, whose speed is measured.")
@click.option("--tokens", type=float, help="The other way round: the model that this many tokens suit.")
@click.option(
    "--utilisation", type=float, default=0.4, show_default=True, help="With --hours: the share of peak assumed."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def size(flops: float | None, hours: float | None, tokens: float | None, utilisation: float, as_json: bool) -> None:
    """Compute-optimal parameters and tokens, by each published set of constants."""
    import thrifty

    sizes = thrifty.recommend_size(flops=flops, hours=hours, tokens=tokens, utilisation=utilisation)
    print_result(sizes, as_json)


@command.command()
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path))
@click.option("--csv", "table", type=click.Path(path_type=Path), help="A table: parameters,tokens,loss.")
@click.option("--flops", type=float, help="Also the best sizes for this compute.")
@click.option("--drop-worst", type=click.IntRange(0), default=0, help="Leave out this many runs of highest loss.")
@click.option("--all-starts", is_flag=True, help="The 4500 starts of the paper in place of 243.")
@click.option("--resamples", type=click.IntRange(2), default=400, show_default=True, help="Bootstrap fits.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the bootstrap.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def fit(runs: tuple[Path, ...], as_json: bool, **options: Any) -> None:
    """Fit the law to RUNS (run folders, or names under runs/) or to a table, with intervals.

    Runs must differ in size and in tokens, and each must have reached the end of its schedule.
    """
    import thrifty

    print_result(thrifty.fit_scaling_law(runs, **options), as_json)
