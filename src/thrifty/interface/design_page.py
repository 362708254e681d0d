"""Offline HTML page of a design comparison: time, cycles and energy by module (station), and cost of masks."""

from collections.abc import Callable, Mapping
from pathlib import Path

from thrifty.interface.design_comparison import (
    ABOUT_HERE,
    ABOUT_MASKS,
    RESULT_COLUMNS,
    DesignCase,
    DesignComparison,
    format_joules,
    mask_cells,
    measured_cells,
    remarks,
    result_cells,
)
from thrifty.reporting.bar_page import StackedBar, bars, details_block, figure, heading, legend, page, paragraph, table
from thrifty.reporting.number_format import duration, scaled
from thrifty.simulators.accelerator.simulation_result import SimulationResult

Values = Mapping[str, tuple[float, ...]]
"""Values of the bars of one design, by row name: one value per segment of a bar. A row is a module, an action, or "".
"""


def write_page(comparison: DesignComparison, path: Path) -> None:
    """Write charts with a bar for each filter, then all tables and remarks."""
    results = [case.result for case in comparison.cases]
    trace, shared = comparison.trace, ", ".join(f"{key} {value:g}" for key, value in comparison.budget.items())
    about = f"{trace.name}: {len(trace.layers)} layers, {trace.units} heads, density {trace.density:.3f}. "
    about += f"All under the same {shared}." if shared else "Each machine as it is published."
    body = [
        _figure(comparison, "Time", "s", lambda case: {"": (case.result.seconds,)}, duration),
        _figure(
            comparison,
            "Cycles by station",
            "of one copy; dark: working, lighter: blocked, lightest: idle",
            lambda case: _cycles(case.result),
            lambda cycles: scaled(cycles),
        ),
        _figure(
            comparison, "Energy by station", "of published modules, without an outer memory", _by_station, format_joules
        ),
        _figure(comparison, "Energy by action", results[0].row()["energy_table"], _by_action, format_joules),
    ]
    if any("output error" in case.trace.provenance for case in comparison.cases):
        body.append(_figure(comparison, "Error of the outputs", "norm relative to the output", _error, "{:.3f}".format))
    body += [heading("Designs"), _numbers(list(RESULT_COLUMNS), [result_cells(result) for result in results])]
    if comparison.has_mask_costs:
        body += [heading("Masks"), paragraph(ABOUT_MASKS), _numbers(*mask_cells(comparison))]
    if comparison.here:
        body += [heading("This machine"), paragraph(ABOUT_HERE), _numbers(*measured_cells(comparison))]
    body += [heading("Remarks"), *(paragraph(line) for line in remarks(comparison))]
    path.write_text(page("Attention on accelerators, simulated", about, body), encoding="utf-8")


def _figure(
    comparison: DesignComparison,
    title: str,
    unit: str,
    values: Callable[[DesignCase], Values],
    format_value: Callable[[float], str],
) -> str:
    """Return a chart with one group of bars for each design and row. A collapsed table contains the values."""
    rows: dict[str, dict[str, StackedBar]] = {}
    for case in comparison.cases:
        for name, parts in values(case).items():
            label = f"{case.design} · {name}" if name else case.design
            rows.setdefault(label, {})[case.filter] = StackedBar(parts, format_value(parts[0]))
    if not rows:
        return ""
    drawn = bars(title, sorted(rows.items(), key=lambda row: _place(comparison, row[0])), comparison.filters)
    cells = [
        [name, *(group[key].text if key in group else "" for key in comparison.filters)] for name, group in rows.items()
    ]
    folds = details_block("Numbers", _numbers(["", *comparison.filters], cells))
    return figure(title, unit, drawn + folds, legend(comparison.filters))


def _place(comparison: DesignComparison, label: str) -> int:
    """Return the position of the row's design in the order of the arguments."""
    designs = list(dict.fromkeys(case.design for case in comparison.cases))
    return designs.index(label.partition(" · ")[0])


def _numbers(titles: list[str], rows: list[list[str]]) -> str:
    return table(titles, rows, titles[1:])


def _cycles(result: SimulationResult) -> Values:
    return {
        name: tuple(each / result.machine.copies for each in (time.busy, time.blocked, time.starved))
        for name, time in result.stations.items()
    }


def _by_station(case: DesignCase) -> Values:
    energy, stations = case.result.energy("activity"), {}
    for name, joules in (energy.parts if energy else {}).items():
        station = case.result.machine.modules[name].active
        stations[station] = (stations.get(station, (0.0,))[0] + joules,)
    return stations


def _by_action(case: DesignCase) -> Values:
    energy = case.result.energy("actions")
    return {name.replace("_", " "): (joules,) for name, joules in (energy.parts if energy else {}).items()}


def _error(case: DesignCase) -> Values:
    error = case.trace.provenance.get("output error")
    return {} if error is None else {"": (float(error),)}
