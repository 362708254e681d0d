"""`thrifty simulate attention` and `gemm`: accelerators of the literature on one and the same workload."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from thrifty.hardware.machine import Machine
    from thrifty.hardware.result import Result


@click.command()
@click.option("--designs", required=True, metavar="NAME,…", help="Machines: names, or TOML files; NAME:KEY=VALUE sets.")
@click.option("--trace", required=True, type=click.Path(path_type=Path), help="What `thrifty trace` wrote.")
@click.option("--iso", metavar="KEY=VALUE,…", help="The same multipliers, clock (Hz), bandwidth (bytes/s) for all.")
@click.option(
    "--engine", default="scan", show_default=True, help="scan, or event: with the memory's latency and banks."
)
@click.option("--table", default="horowitz-45nm", show_default=True, help="Energies of counted actions; all for each.")
@click.option(
    "--filter",
    "chosen_filter",
    type=click.Choice(["trace", "own"]),
    default="trace",
    show_default=True,
    help="The masks of the trace for all, or each design's own filter.",
)
@click.option("--density", type=float, default=0.2, show_default=True, help="Share that own filters keep.")
@click.option("--against", metavar="NAME", help="One of the designs, to tell why others are faster at equal peak.")
@click.option("--csv", "folder", type=click.Path(path_type=Path), help="Write reports and action counts into a folder.")
@click.option("--perfetto", type=click.Path(path_type=Path), help="Write a timeline for ui.perfetto.dev.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def attention(
    designs: str,
    trace: Path,
    iso: str | None,
    engine: str,
    table: str,
    chosen_filter: str,
    density: float,
    against: str | None,
    folder: Path | None,
    perfetto: Path | None,
    as_json: bool,
) -> None:
    """Attention of a trace on several designs: cycles, seconds, stalls, bytes, energy, area. All are given the masks of
    the trace, or, with --filter own, what each one's own filter keeps of the recorded queries and keys."""
    from thrifty.cli.simulate_comparison import tell_factors, tell_masks, tell_tables
    from thrifty.cli.telling import print_json
    from thrifty.core.errors import UsageError, did_you_mean
    from thrifty.hardware.energy import table_names
    from thrifty.hardware.result_files import write_csv, write_perfetto
    from thrifty.hardware.simulate import simulate, within
    from thrifty.hardware.trace_file import load_trace

    budget = read_budget(iso)
    chosen = [within(find_set(words), **budget) for words in designs.split(",") if words]
    if not chosen:
        raise UsageError("no design was named", fix="for example --designs elsa,a3,dense")
    loaded = load_trace(trace)
    traces = [loaded] * len(chosen)
    if chosen_filter == "own":
        from thrifty.hardware.own_filters import filtered

        made = {design: filtered(loaded, design, density) for design in {machine.design for machine in chosen}}
        traces = [made[machine.design] for machine in chosen]
    names = [machine.name for machine in chosen]
    if against is not None and against not in names:
        raise UsageError(f"--against: {against!r} is not among the designs", fix=did_you_mean(against, names))
    priced = "horowitz-45nm" if table == "all" else table
    results = [
        simulate(machine, given, engine, priced, draw=perfetto is not None)
        for machine, given in zip(chosen, traces, strict=True)
    ]
    if folder is not None:
        write_csv(results, folder)
    if perfetto is not None:
        write_perfetto(results, perfetto)
    if as_json:
        masks = [{"density": given.density, **given.provenance} for given in traces]
        print_json(
            {"budget": budget, "results": [r.as_dict() | {"masks": m} for r, m in zip(results, masks, strict=True)]}
        )
        return
    click.echo(f"{loaded.name}: {len(loaded.layers)} layers, {loaded.units} heads, density {loaded.density:.3f}\n")
    _tell(results)
    if chosen_filter == "own":
        tell_masks(results, traces)
    if against is not None:
        tell_factors(results, results[names.index(against)])
    if table == "all":
        tell_tables(results, table_names())
    for path in (folder, perfetto):
        if path is not None:
            click.echo(f"\nwrote {path}")


@click.command()
@click.argument("topology", type=click.Path(path_type=Path))
@click.option("--cfg", type=click.Path(path_type=Path), help="SCALE-Sim's architecture; 32 x 32, os, unless given.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def gemm(topology: Path, cfg: Path | None, as_json: bool) -> None:
    """Matrix products of a SCALE-Sim TOPOLOGY (Layer,M,N,K) on a systolic array, without stalls."""
    from thrifty.cli.simulate import tell_table
    from thrifty.cli.telling import print_json
    from thrifty.hardware.machine_file import find_machine
    from thrifty.hardware.scale_sim import compute_report, read_cfg, read_topology

    machine = find_machine("systolic") if cfg is None else read_cfg(cfg)
    rows = compute_report(read_topology(topology), machine)
    if as_json:
        print_json({"settings": dict(machine.settings), "layers": rows})
        return
    tell_table(
        ["layer", "cycles", "utilisation %", "mapping %"],
        [
            [
                row["Layer"],
                f"{row['Total Cycles']:,}",
                f"{row['Overall Util %']:.1f}",
                f"{row['Mapping Efficiency %']:.1f}",
            ]
            for row in rows
        ],
    )


def find_set(words: str) -> Machine:
    """A machine by `NAME`, or `NAME:KEY=VALUE:KEY=VALUE` with values changed, by whose words it is then called."""
    from dataclasses import replace

    from thrifty.core.errors import UsageError
    from thrifty.hardware.machine_file import find_machine

    name, *assignments = words.strip().split(":")
    machine = find_machine(name)
    for assignment in assignments:
        path, equals, value = assignment.partition("=")
        if not equals:
            raise UsageError(f"{assignment!r} sets nothing", fix=f"for example {name}:copies=2")
        machine = replace(machine.replaced(path.strip(), value.strip()), name=words.strip())
    return machine


def read_budget(text: str | None) -> dict[str, float]:
    """`multipliers=128,clock=1e9,bandwidth=64e9` as numbers."""
    from thrifty.core.errors import UsageError, did_you_mean

    known, budget = ("multipliers", "clock", "bandwidth"), {}
    for word in filter(None, (text or "").split(",")):
        key, _, value = word.partition("=")
        if key.strip() not in known:
            raise UsageError(f"--iso: there is no budget of {key.strip()!r}", fix=did_you_mean(key.strip(), known))
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not number > 0 or (key.strip() == "multipliers" and not number.is_integer()):
            raise UsageError(f"--iso: {word!r} is no amount above zero", fix=f"for example {key.strip()}=128")
        budget[key.strip()] = int(number) if key.strip() == "multipliers" else number
    return budget


def _tell(results: list[Result]) -> None:
    from thrifty.cli.simulate import tell_table
    from thrifty.report.units import MISSING, duration, percent, scaled

    rows = []
    for result in results:
        row = result.row()
        by = [joules(row[key]) for key in ("energy_by_activity", "energy_by_actions")]
        area = MISSING if row["area_mm2"] is None else f"{row['area_mm2']:.3g} mm²"
        rows.append(
            [
                row["machine"],
                f"{row['cycles']:,}",
                duration(row["seconds"]),
                f"{row['multipliers']:,}",
                percent(row["utilisation"]),
                scaled(row["dense_operations_per_second"], "op/s"),
                scaled(row["outer_bytes"], "B"),
                *by,
                area,
            ]
        )
    titles = ["design", "cycles", "time", "multipliers", "utilisation", "dense rate", "in and out"]
    tell_table([*titles, "energy, modules", "energy, actions", "area"], rows)
    click.echo()
    stalls = [
        [result.machine.name, name]
        + [percent(getattr(time, kind) / (time.busy + time.starved + time.blocked)) for kind in vars(time)]
        for result in results
        for name, time in result.stations.items()
    ]
    tell_table(["design", "station", "busy", "starved", "blocked"], stalls)
    click.echo(
        "\nModules are priced as published, without an outer memory; actions, with it, by "
        f"{results[0].row()['energy_table']}. Sizes of different nodes do not compare."
    )
    for note in dict.fromkeys(note for result in results for note in result.notes):
        click.echo(note)
    for result in results:
        if result.machine.grade in "SM":
            click.echo(f"{result.machine.name} is not verified: {result.machine.source}")
        for energy in result.energies:
            if energy.unpriced:
                click.echo(f"{result.machine.name}: {energy.table} has no price for {', '.join(energy.unpriced)}")


def joules(energy: float | None) -> str:
    """0.00387 -> "3.87 mJ"."""
    from thrifty.report.units import MISSING, significant

    if energy is None:
        return MISSING
    size, unit = next(((s, u) for s, u in ((1, "J"), (1e-3, "mJ"), (1e-6, "µJ")) if energy >= s), (1e-9, "nJ"))
    return f"{significant(energy / size)} {unit}"
