"""How a comparison of designs is told: its tables as lines of text, for the terminal and for a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from thrifty.cli.verb_output import open_table, wide_console
from thrifty.reporting.number_format import MISSING, duration, percent, scaled, significant

if TYPE_CHECKING:
    from thrifty.cli.simulate.design_comparison import DesignComparison
    from thrifty.simulators.accelerator.simulation_result import SimulationResult

COSTS = ("softmax kept", "output error")
"""What a filter's masks cost, by their names in a trace's provenance."""


def print_comparison(comparison: DesignComparison, against: str | None, all_tables: bool) -> None:
    """All of it as tables; `against` names a design, under the first filter."""
    from thrifty.simulators.accelerator.energy_model import table_names

    trace, results = comparison.trace, [case.result for case in comparison.cases]
    click.echo(f"{trace.name}: {len(trace.layers)} layers, {trace.units} heads, density {trace.density:.3f}\n")
    print_wordss(results)
    click.echo()
    for line in remarks(comparison):
        click.echo(line)
    if comparison.loss is not None or comparison.filters != ("trace",):
        click.echo(f"\n{ABOUT_MASKS}")
        print_table(*mask_cells(comparison))
    if comparison.here:
        click.echo(f"\n{ABOUT_HERE}")
        print_table(*measured_cells(comparison))
    if against is not None:
        print_factors(results, next(case.result for case in comparison.cases if case.design == against))
    if all_tables:
        print_energy_tables(results, table_names())


RESULT_COLUMNS = ("design", "cycles", "time", "multipliers", "utilisation", "dense rate", "in and out",
                  "energy, modules", "energy, actions", "area")  # fmt: skip


def result_cells(result: SimulationResult) -> list[str]:
    """A line of RESULT_COLUMNS."""
    row = result.row()
    return [
        row["machine"],
        f"{row['cycles']:,}",
        duration(row["seconds"]),
        f"{row['multipliers']:,}",
        percent(row["utilisation"]),
        scaled(row["dense_operations_per_second"], "op/s"),
        scaled(row["outer_bytes"], "B"),
        *(format_joules(row[key]) for key in ("energy_by_activity", "energy_by_actions")),
        MISSING if row["area_mm2"] is None else f"{row['area_mm2']:.3g} mm²",
    ]


def print_wordss(results: list[SimulationResult]) -> None:
    print_table(list(RESULT_COLUMNS), [result_cells(result) for result in results])
    click.echo()
    stalls = [
        [result.machine.name, name]
        + [percent(getattr(time, kind) / (time.busy + time.starved + time.blocked)) for kind in vars(time)]
        for result in results
        for name, time in result.stations.items()
    ]
    print_table(["design", "station", "busy", "starved", "blocked"], stalls)


def remarks(comparison: DesignComparison) -> list[str]:
    """What has to be known of the figures."""
    lines = [
        "Modules are priced as published, without an outer memory; actions, with it, by "
        f"{comparison.cases[0].result.row()['energy_table']}. Sizes of different nodes do not compare."
    ]
    without = [case.design for case in comparison.cases if "dram" not in case.result.machine.memories]
    if 0 < len(without) < len(comparison.cases):
        named = ", ".join(dict.fromkeys(without))
        lines.append(
            f"{named}: no outer memory, so its accesses are in no energy; --equal-resources bandwidth=… gives all one"
        )
    for case in comparison.cases:
        if case.trace.provenance.get("within allowed") == "no":
            allowed = case.trace.provenance["error allowed"]
            lines.append(f"{case.result.machine.name}: no threshold of its filter gets within an error of {allowed}")
    lines += [note for case in comparison.cases for note in case.result.notes]
    for case in comparison.cases:
        if case.result.machine.grade in "SM":
            lines.append(f"{case.design} is not verified: {case.result.machine.source}")
        for energy in case.result.energies:
            if energy.unpriced:
                lines.append(f"{case.design}: {energy.table} has no price for {', '.join(energy.unpriced)}")
    return list(dict.fromkeys(lines))


def mask_cells(comparison: DesignComparison) -> tuple[list[str], list[list[str]]]:
    """What each one's masks keep and cost: titles and lines."""
    titles = ["design", "density", *COSTS]
    rows = [
        [case.result.machine.name, f"{case.trace.density:.3f}", *(case.trace.provenance.get(k, MISSING) for k in COSTS)]
        for case in comparison.cases
    ]
    if comparison.loss is None:
        return titles, rows
    losses = [case.loss for case in comparison.cases]
    lines = [[*row, MISSING if loss is None else f"{loss:.4f}"] for row, loss in zip(rows, losses, strict=True)]
    return [*titles, f"held-out loss ({comparison.loss:.4f} as traced)"], lines


ABOUT_MASKS = (
    "What the masks keep, and what that costs. Thresholds, and ViTCoD's average maps, are found on the very examples "
    "that are judged here; detectors that a paper trains are untrained. Masks of every layer are found from "
    "what the model computes with all pairs."
)


def measured_cells(comparison: DesignComparison) -> tuple[list[str], list[list[str]]]:
    """Simulated times beside those measured here: titles and lines."""
    here = [duration(seconds) for seconds in comparison.here.values()]
    rows = [
        [case.result.machine.name, duration(case.result.seconds), *here, duration(case.kept_here)]
        for case in comparison.cases
    ]
    pairs = (f"here, all pairs, {name}" for name in comparison.here)
    return ["design", "simulated", *pairs, "here, its pairs, scipy"], rows


ABOUT_HERE = (
    "Simulated is the accelerator; here is this machine now: all pairs by torch's attention (causal where the trace "
    "is), the pairs of the masks by scipy on one thread. Ratios of the two are no paper's."
)


def print_factors(results: list[SimulationResult], other: SimulationResult) -> None:
    from thrifty.simulators.accelerator.iso_peak import iso_peak

    click.echo(
        f"\nAt equal peak, faster than {other.machine.name} by fewer operations, times utilisation over its own:"
    )
    kinds = ("ratio", "omitted", "utilisation", "other_utilisation")
    compared = {result.machine.name: iso_peak(result, other) for result in results if result is not other}
    rows = [[name, *(f"{getattr(factors, kind):.3g}" for kind in kinds)] for name, factors in compared.items()]
    print_table(["design", "faster", "fewer operations", "utilisation", f"of {other.machine.name}"], rows)


def print_energy_tables(results: list[SimulationResult], names: list[str]) -> None:
    from thrifty.simulators.accelerator.energy_model import by_tables

    estimates = [by_tables(result.operations) for result in results]
    click.echo(f"\nThe same actions by each table ({', '.join(names)}):")
    rows = [
        [result.machine.name, *(format_joules(energy.total) for energy in energies)]
        for result, energies in zip(results, estimates, strict=True)
    ]
    print_table(["design", *(energy.table for energy in estimates[0])], rows)


def print_table(titles: list[str], rows: list[list[str]]) -> None:
    table = open_table()
    for place, title in enumerate(titles):
        table.add_column(title, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    wide_console().print(table)


def format_joules(energy: float | None) -> str:
    """0.00387 -> "3.87 mJ"."""
    if energy is None:
        return MISSING
    size, unit = next(((s, u) for s, u in ((1, "J"), (1e-3, "mJ"), (1e-6, "µJ")) if energy >= s), (1e-9, "nJ"))
    return f"{significant(energy / size)} {unit}"
