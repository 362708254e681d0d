"""Scaling laws: optimal model size for a compute budget, and laws fitted to runs."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType

from thrifty.core.errors import UsageError
from thrifty.machine.throughput import measure_throughput
from thrifty.models.families import assemble
from thrifty.models.model_presets import PRESETS
from thrifty.planning.published_laws import BEST, FITTED_FLOPS, PUBLISHED
from thrifty.planning.scaling_law import check_amount, recommend
from thrifty.planning.scaling_law_fit import COARSE_STARTS, PAPER_STARTS, TrainedRun, fit
from thrifty.planning.scaling_runs import runs_from_folders, runs_from_table
from thrifty.reporting.number_format import percent, scaled, significant
from thrifty.reporting.printed_result import PrintedResult, lines, open_table
from thrifty.reporting.run_record import run_folder

SHOWN = {"parameters": "parameters", "tokens": "tokens", "flops": "FLOP", "tokens_per_parameter": "tokens/parameter"}
"""Columns of the table of sizes. Of tokens and FLOPs only the computed quantity is shown."""


@dataclass(frozen=True, repr=False)
class RecommendedSizes(PrintedResult):
    """Compute-optimal parameters and tokens by each published law, as plain data."""

    facts: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return self.facts

    def __rich__(self) -> RenderableType:
        return lines(*_size_parts(self.facts))


@dataclass(frozen=True, repr=False)
class FittedLaw(PrintedResult):
    """A scaling law fitted to runs, with 95 % intervals, as plain data."""

    facts: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return self.facts

    def __rich__(self) -> RenderableType:
        return lines(*_fit_parts(self.facts))


def recommend_size(
    *, flops: float | None = None, hours: float | None = None, tokens: float | None = None, utilisation: float = 0.4
) -> RecommendedSizes:
    """Recommend compute-optimal parameters and tokens, for each published set of constants.

    Args:
        flops: Compute budget.
        hours: Training time on this machine at `utilisation` (a fraction) of its measured peak FLOP/s.
        tokens: Number of training tokens, from which the model size is computed.

    Raises UsageError unless exactly one of `flops`, `hours` and `tokens` is passed.

    Example::

        print(thrifty.recommend_size(flops=1e18))
    """
    amounts = {"--flops": flops, "--hours": hours, "--tokens": tokens}
    quantities = {name: amount for name, amount in amounts.items() if amount is not None}
    if len(quantities) != 1:
        what = " and ".join(quantities) + " exclude each other" if quantities else "there is no compute budget"
        raise UsageError(what, fix="--flops 1e18; or --hours 8; or --tokens 1e9")
    for name, amount in quantities.items():
        check_amount(name, amount)
    machine = None
    if hours is not None:
        machine = measure_throughput(utilisation)
        flops = machine.sustained * 3600 * hours
    rows = [each.as_dict() | each.recommend(flops=flops, tokens=tokens).as_dict() for each in PUBLISHED]
    best = rows[PUBLISHED.index(BEST)]
    facts = {
        "given": {name.strip("-"): amount for name, amount in quantities.items()},
        "machine": None if machine is None else asdict(machine) | {"sustained": machine.sustained},
        "flops": best["flops"],
        "fitted_flops": FITTED_FLOPS.ends(),
        "rows": rows,
        "nearest_preset": _nearest_preset(best["parameters"]) | {"for": BEST.name},
    }
    return RecommendedSizes(facts)


def fit_scaling_law(
    runs: Sequence[Any] = (),
    *,
    table: str | Path | None = None,
    flops: float | None = None,
    drop_worst: int = 0,
    all_starts: bool = False,
    resamples: int = 400,
    seed: int = 0,
) -> FittedLaw:
    """Fit a scaling law to runs, or to a .csv `table` with the columns parameters, tokens and loss.

    Args:
        runs: Runs, run folders, or names under ./runs. The runs must be finished, and differ in model size and in
            tokens.
        flops: Compute budget for which the best sizes are also returned.
        drop_worst: Number of runs with the highest loss to drop.
        all_starts: True to fit from the paper's 4500 starting points instead of 243.
        resamples: Number of bootstrap fits for the 95 % intervals.

    Raises UsageError if there are no runs, or if the runs do not determine a law.

    Example::

        law = thrifty.fit_scaling_law(["small", "medium", "large", "wide"], flops=1e15)
        print(law)
    """
    if flops is not None:
        check_amount("--flops", flops)
    points = _read(runs, None if table is None else Path(table))
    kept = sorted(points, key=lambda run: run.loss)[: max(0, len(points) - drop_worst)]
    return FittedLaw(_fitted(kept, flops, all_starts, resamples, seed))


def _fitted(
    points: list[TrainedRun], flops: float | None, all_starts: bool, resamples: int, seed: int
) -> dict[str, Any]:
    """Return a fitted law as plain data. With `flops`, include recommended sizes."""
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


def _read(runs: Sequence[Any], table: Path | None) -> list[TrainedRun]:
    if bool(runs) == (table is not None):
        what = "pass runs or a table, not both" if runs else "there are no runs to fit"
        raise UsageError(what, fix="name run folders, or pass --csv FILE with the columns parameters,tokens,loss")
    return runs_from_table(table) if table is not None else runs_from_folders([run_folder(run) for run in runs])


def _nearest_preset(parameters: float) -> dict[str, Any]:
    """Return the language-model preset with the number of parameters closest to `parameters`, by ratio. Presets are
    counted with their published vocabulary."""
    with torch.device("meta"):
        counts = {
            name: sum(p.numel() for p in assemble(shape).parameters())
            for name, shape in PRESETS.items()
            if shape.style in ("gpt", "llama")
        }
    name = min(counts, key=lambda name: abs(math.log(counts[name] / parameters)))
    return {"name": name, "parameters": counts[name], "ratio": counts[name] / parameters}


def _size_parts(facts: dict[str, Any]) -> list[RenderableType]:
    printed: list[RenderableType] = []
    if machine := facts["machine"]:
        peak, sustained = (scaled(machine[name], "FLOP/s") for name in ("peak", "sustained"))
        printed.append(
            f"{machine['device']}: {peak} of {machine['dtype']} matmul measured, {machine['utilisation']:g} of it "
            f"assumed for training (--utilisation): {sustained}; "
            f"{facts['given']['hours']:g} h are {_power(facts['flops'])} FLOP\n"
        )
    printed.append(_table(facts["rows"]))
    printed.append("")
    for row in facts["rows"]:
        printed.append(f"{row['name']}: {row['source']}; {row['evidence']}")
    origins = dict.fromkeys(row["uncertainty"] for row in facts["rows"] if row["uncertainty"])
    printed.append("\n(95 %): " + "; ".join(origins))
    printed += _extrapolation(facts["rows"], facts["fitted_flops"])
    printed.append("the constants hold for the text and tokenizer of their runs; fit your own with `thrifty plan fit`")
    preset, ratio = facts["nearest_preset"], facts["nearest_preset"]["ratio"]
    apart = f"{significant(max(ratio, 1 / ratio))} times {'larger' if ratio > 1 else 'smaller'} than {preset['for']}"
    printed.append(f"nearest preset: {preset['name']} with {scaled(preset['parameters'])} parameters, {apart}")
    return printed


def _fit_parts(facts: dict[str, Any]) -> list[RenderableType]:
    printed: list[RenderableType] = []
    printed.append(
        f"{facts['runs']} runs of {_span(facts['parameters'], scaled)} parameters and "
        f"{_span(facts['fitted_flops'], _power)} FLOP; {facts['agreeing']} of {facts['starts']} starts reached the "
        f"minimum; median error {percent(facts['median_residual'], 2)}\n"
    )
    for name, value in facts["constants"].items():
        title = "exponent of N" if name == "size_exponent" else name
        printed.append(f"{title:<14} {significant(value, 4):>10}  {_span(facts['intervals'][name], significant)}")
    printed.append(f"\n(95 %): {facts['resamples']} fits to runs resampled with replacement")
    if facts["without_optimum"]:
        printed.append(f"{percent(facts['without_optimum'])} of these fits have no best size")
    if facts["sizing"]:
        printed.append("")
        printed.append(_table([facts["sizing"]]))
        printed += _extrapolation([facts["sizing"]], facts["fitted_flops"])
    return printed


def _table(rows: list[dict[str, Any]]) -> RenderableType:
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
    return table


def _extrapolation(rows: list[dict[str, Any]], fitted_flops: list[float]) -> list[str]:
    if all(fitted_flops[0] <= row["flops"] <= fitted_flops[1] for row in rows):
        return []
    return [f"extrapolated: the constants come from runs of {_span(fitted_flops, _power)} FLOP"]


def _power(value: float) -> str:
    return f"{value:.3g}".replace("e+", "e")


def _span(interval: list[float] | None, show: Any) -> str:
    return "unknown" if interval is None else f"{show(interval[0])} to {show(interval[1])}"
