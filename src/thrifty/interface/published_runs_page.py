"""Offline page of published training runs: measured and simulated values as bars."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from thrifty.reporting.bar_page import StackedBar, bars, details_block, figure, legend, page, table
from thrifty.reporting.number_format import percent, scaled

SERIES = ("measured", "simulated")
QUANTITIES = {
    "hardware_flops": ("Hardware FLOP rate", "FLOP/s"),
    "model_flops": ("Model FLOP rate", "FLOP/s"),
    "mfu": ("Utilization of the peak rate", ""),
    "step_seconds": ("Step time", "s"),
}
"""Title and unit of each quantity."""


def published_runs_page(data: Mapping[str, Any]) -> str:
    """Return the page of the result that `thrifty simulate published --json` prints."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for run in data["runs"]:
        groups[run["quantity"]].append(run)
    body = []
    for quantity, runs in groups.items():
        title, unit = QUANTITIES.get(quantity, (quantity, ""))
        rows = [
            (run["run"], {name: StackedBar((run[name],), scaled(run[name], unit)) for name in SERIES}) for run in runs
        ]
        cells = [
            [run["run"], run["paper"], *(scaled(run[name], unit) for name in SERIES), percent(run["off"])]
            for run in runs
        ]
        numbers = table(["run", "paper", *SERIES, "error"], cells, (*SERIES, "error"))
        drawn = bars(title, rows, SERIES) + details_block("Numbers", numbers)
        body.append(figure(title, unit, drawn, legend(SERIES)))
    fits = sum(bool(run["fits"]) for run in data["runs"])
    about = f"Published measurements and their simulation. {fits} of {len(data['runs'])} are within their tolerance."
    return page("Training runs on clusters, simulated", about, body)
