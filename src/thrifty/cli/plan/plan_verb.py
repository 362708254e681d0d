"""`thrifty plan`: which techniques to switch on, or what to train for a given compute by scaling laws."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thrifty.cli.plan.plan_recipe import plan_recipe
from thrifty.cli.verb_output import open_table, print_words, wide_console
from thrifty.core.errors import UsageError
from thrifty.reporting.number_format import percent, scaled, significant
from thrifty.reporting.run_record import find_run

if TYPE_CHECKING:
    from thrifty.planning.scaling_law_fit import TrainedRun

SHOWN = {"parameters": "parameters", "tokens": "tokens", "flops": "FLOP", "tokens_per_parameter": "tokens/parameter"}
"""Columns of the table of sizes; of tokens and FLOP only the one that was asked for."""


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
    facts = recommend_sizes(flops, hours, tokens, utilisation)
    print_words(facts, lambda: _tell_sizes(facts), as_json)


@command.command()
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path))
@click.option("--csv", "table", type=click.Path(path_type=Path), help="A table: parameters,tokens,loss.")
@click.option("--flops", type=float, help="Also the best sizes for this compute.")
@click.option("--drop-worst", type=click.IntRange(0), default=0, help="Leave out this many runs of highest loss.")
@click.option("--all-starts", is_flag=True, help="The 4500 starts of the paper in place of 243.")
@click.option("--resamples", type=click.IntRange(2), default=400, show_default=True, help="Bootstrap fits.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the bootstrap.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def fit(
    runs: tuple[Path, ...], table: Path | None, flops: float | None, drop_worst: int, as_json: bool, **how: Any
) -> None:
    """Fit the law to RUNS (run folders, or names under runs/) or to a table, with intervals.

    Runs must differ in size and in tokens, and each must have reached the end of its schedule.
    """
    from thrifty.planning.scaling_law import check_amount

    if flops is not None:
        check_amount("--flops", flops)
    points = _read(runs, table)
    kept = sorted(points, key=lambda run: run.loss)[: max(0, len(points) - drop_worst)]
    facts = fit_law(kept, flops, **how)
    print_words(facts, lambda: _tell_fit(facts), as_json)


def recommend_sizes(
    flops: float | None, hours: float | None, tokens: float | None, utilisation: float
) -> dict[str, Any]:
    """What each published law recommends, as plain data. Exactly one of flops, hours and tokens is given."""
    from dataclasses import asdict

    from thrifty.machine.throughput import measure_throughput
    from thrifty.planning.published_laws import BEST, FITTED_FLOPS, PUBLISHED
    from thrifty.planning.scaling_law import check_amount

    amounts = {"--flops": flops, "--hours": hours, "--tokens": tokens}
    quantities = {name: amount for name, amount in amounts.items() if amount is not None}
    if len(quantities) != 1:
        what = " and ".join(quantities) + " are both given" if quantities else "the compute to plan for is not given"
        raise UsageError(what, fix="give one of --flops 1e18, --hours 8 or --tokens 1e9")
    for name, amount in quantities.items():
        check_amount(name, amount)
    machine = None
    if hours is not None:
        machine = measure_throughput(utilisation)
        flops = machine.sustained * 3600 * hours
    rows = [each.as_dict() | each.recommend(flops=flops, tokens=tokens).as_dict() for each in PUBLISHED]
    best = rows[PUBLISHED.index(BEST)]
    return {
        "given": {name.strip("-"): amount for name, amount in quantities.items()},
        "machine": None if machine is None else asdict(machine) | {"sustained": machine.sustained},
        "flops": best["flops"],
        "fitted_flops": FITTED_FLOPS.ends(),
        "rows": rows,
        "nearest_preset": _nearest_preset(best["parameters"]) | {"for": BEST.name},
    }


def fit_law(
    points: list[TrainedRun], flops: float | None, all_starts: bool, resamples: int, seed: int
) -> dict[str, Any]:
    """A law fitted to runs, as plain data; with `flops` what it recommends."""
    from thrifty.planning.scaling_law import recommend
    from thrifty.planning.scaling_law_fit import COARSE_STARTS, PAPER_STARTS, fit

    law_fit = fit(points, PAPER_STARTS if all_starts else COARSE_STARTS, resamples=resamples, seed=seed)
    law, draws = law_fit.law, law_fit.draws
    names = ("E", "A", "B", "alpha", "beta", "size_exponent")
    intervals = {name: draws.interval(getattr(draws.law, name)) if draws else None for name in names}
    sizes, budgets = [run.parameters for run in points], [run.flops for run in points]
    return {
        "runs": len(points),
        "parameters": [min(sizes), max(sizes)],
        "fitted_flops": [min(budgets), max(budgets)],
        "constants": {name: getattr(law, name) for name in names},
        "intervals": {name: interval and interval.ends() for name, interval in intervals.items()},
        "median_residual": law_fit.residual,
        "starts": law_fit.starts,
        "agreeing": law_fit.agreeing,
        "resamples": resamples,
        "without_optimum": draws.without_optimum if draws else 1.0,
        "sizing": {"name": "your runs", **recommend(law, draws, flops=flops).as_dict()} if flops else None,
    }


def _read(runs: tuple[Path, ...], table: Path | None) -> list[TrainedRun]:
    from thrifty.planning.scaling_runs import runs_from_folders, runs_from_table

    if bool(runs) == (table is not None):
        what = "both runs and a table are given" if runs else "there is nothing to fit"
        raise UsageError(what, fix="name run folders, or give --csv FILE with the columns parameters,tokens,loss")
    return runs_from_table(table) if table is not None else runs_from_folders([find_run(run) for run in runs])


def _nearest_preset(parameters: float) -> dict[str, Any]:
    """The language model among the presets whose size is nearest by ratio, with its vocabulary as published."""
    import math

    import torch

    from thrifty.models.model_presets import PRESETS, assemble

    with torch.device("meta"):
        counts = {
            name: sum(p.numel() for p in assemble(shape).parameters())
            for name, shape in PRESETS.items()
            if shape.style in ("gpt", "llama")
        }
    name = min(counts, key=lambda name: abs(math.log(counts[name] / parameters)))
    return {"name": name, "parameters": counts[name], "ratio": counts[name] / parameters}


def _tell_sizes(facts: dict[str, Any]) -> None:
    if machine := facts["machine"]:
        peak, sustained = (scaled(machine[name], "FLOP/s") for name in ("peak", "sustained"))
        click.echo(
            f"{machine['device']}: {peak} of {machine['dtype']} products measured, {machine['utilisation']:g} of it "
            f"assumed for training (--utilisation): {sustained}; "
            f"{facts['given']['hours']:g} h are {_power(facts['flops'])} FLOP\n"
        )
    _tell_table(facts["rows"])
    click.echo()
    for row in facts["rows"]:
        click.echo(f"{row['name']}: {row['source']}; {row['evidence']}")
    origins = dict.fromkeys(row["uncertainty"] for row in facts["rows"] if row["uncertainty"])
    click.echo("\n(95 %): " + "; ".join(origins))
    _tell_extrapolation(facts["rows"], facts["fitted_flops"])
    click.echo("the constants hold for the text and the tokenizer of their runs: fit your own with `thrifty plan fit`")
    preset, ratio = facts["nearest_preset"], facts["nearest_preset"]["ratio"]
    apart = (
        f"{significant(max(ratio, 1 / ratio))} times {'larger' if ratio > 1 else 'smaller'} than {preset['for']} says"
    )
    click.echo(f"nearest preset: {preset['name']} with {scaled(preset['parameters'])} parameters, {apart}")


def _tell_fit(facts: dict[str, Any]) -> None:
    click.echo(
        f"{facts['runs']} runs of {_span(facts['parameters'], scaled)} parameters and "
        f"{_span(facts['fitted_flops'], _power)} FLOP; {facts['agreeing']} of {facts['starts']} starts ended at the "
        f"minimum; median error {percent(facts['median_residual'], 2)}\n"
    )
    for name, value in facts["constants"].items():
        title = "exponent of N" if name == "size_exponent" else name
        click.echo(f"{title:<14} {significant(value, 4):>10}  {_span(facts['intervals'][name], significant)}")
    click.echo(f"\n(95 %): {facts['resamples']} fits to runs drawn again with replacement")
    if facts["without_optimum"]:
        click.echo(f"{percent(facts['without_optimum'])} of them have no best size")
    if facts["sizing"]:
        click.echo()
        _tell_table([facts["sizing"]])
        _tell_extrapolation([facts["sizing"]], facts["fitted_flops"])


def _tell_table(rows: list[dict[str, Any]]) -> None:
    shown = {name: title for name, title in SHOWN.items() if name in rows[0]["intervals"]}
    table = open_table("constants")
    for title in (*shown.values(), "loss"):
        table.add_column(title, justify="right")
        table.add_column("(95 %)", no_wrap=True)
    for row in rows:
        cells = [row["name"]]
        for name in (*shown, "loss"):
            show = scaled if name in ("parameters", "tokens") else _power if name == "flops" else significant
            cells += [f"{row[name]:.3f}" if name == "loss" else show(row[name]), _span(row["intervals"][name], show)]
        table.add_row(*cells)
    wide_console().print(table)


def _tell_extrapolation(rows: list[dict[str, Any]], fitted_flops: list[float]) -> None:
    if not all(fitted_flops[0] <= row["flops"] <= fitted_flops[1] for row in rows):
        click.echo(f"extrapolated: the constants come from runs of {_span(fitted_flops, _power)} FLOP")


def _power(value: float) -> str:
    return f"{value:.3g}".replace("e+", "e")


def _span(interval: list[float] | None, show: Any) -> str:
    return "unknown" if interval is None else f"{show(interval[0])} to {show(interval[1])}"
