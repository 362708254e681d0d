"""`thrifty simulate attention` and `gemm`: accelerators of the literature on one and the same workload."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from thrifty.simulators.accelerator.accelerator_spec import AcceleratorSpec
    from thrifty.simulators.accelerator.attention_trace import AttentionTrace
from thrifty.cli.simulate.machine_options import read_machine_options
from thrifty.cli.verb_output import print_json
from thrifty.core.errors import UsageError, did_you_mean, refuse_unknown

FILTERS = ("trace", "exact", "own")


@click.command()
@click.option("--designs", required=True, metavar="NAME,…", help="Machines: names, or TOML files; NAME:KEY=VALUE sets.")
@click.option("--trace", required=True, type=click.Path(path_type=Path), help="What `thrifty trace` wrote.")
@click.option(
    "--equal-resources", metavar="KEY=VALUE,…", help="The same multipliers, clock (Hz), bandwidth (bytes/s) for all."
)
@click.option(
    "--engine", default="scan", show_default=True, help="scan, or event: with the memory's latency and banks."
)
@click.option(
    "--energy-table", default="horowitz-45nm", show_default=True, help="Energies of counted actions; all for each."
)
@click.option(
    "--filter",
    "filters",
    type=click.Choice(FILTERS),
    multiple=True,
    default=("trace",),
    show_default=True,
    help="Masks: those of the trace, the pairs of largest exact scores, or what each design's own filter keeps. May be "
    "given several times.",
)
@click.option("--density", type=float, default=0.2, show_default=True, help="Share that exact and own filters keep.")
@click.option(
    "--max-error", type=float, help="In place of --density: keep so much that outputs are off by at most this."
)
@click.option("--run", type=click.Path(path_type=Path), help="The run of the trace: its held-out loss under each mask.")
@click.option(
    "--baseline-design", metavar="NAME", help="One of the designs, to tell why others are faster at equal peak."
)
@click.option("--measure/--no-measure", default=True, help="Whether to time the same attention on this machine too.")
@click.option("--page", type=click.Path(path_type=Path), help="Write tables and charts as one offline page.")
@click.option("--csv", "folder", type=click.Path(path_type=Path), help="Write reports and action counts into a folder.")
@click.option("--perfetto", type=click.Path(path_type=Path), help="Write a timeline for ui.perfetto.dev.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def attention(
    designs: str,
    trace: Path,
    equal_resources: str | None,
    engine: str,
    energy_table: str,
    filters: tuple[str, ...],
    density: float,
    max_error: float | None,
    run: Path | None,
    baseline_design: str | None,
    measure: bool,
    page: Path | None,
    folder: Path | None,
    perfetto: Path | None,
    as_json: bool,
) -> None:
    """Attention of a trace on several designs: cycles, seconds, stalls, bytes, energy, area. All are given the masks of
    the trace, or others that are found from its queries and keys; then also what that costs in accuracy."""
    from thrifty.cli.simulate.design_comparison import compare_designs
    from thrifty.cli.simulate.simulate_attention_page import write_page
    from thrifty.cli.simulate.simulate_output import print_comparison
    from thrifty.simulators.accelerator.accelerator_simulation import limit_resources
    from thrifty.simulators.accelerator.result_export import write_csv, write_perfetto
    from thrifty.simulators.accelerator.trace_file import load_trace

    budget = read_budget(equal_resources)
    chosen = [limit_resources(read_machine_options(words), **budget) for words in designs.split(",") if words]
    names = [machine.name for machine in chosen]
    if not chosen:
        raise UsageError("no design was named", fix="for example --designs elsa,a3,dense")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"--designs names {twice[0]} twice", fix="name it once, or set something, as in elsa:copies=2")
    if baseline_design is not None and baseline_design not in names:
        raise UsageError(
            f"--baseline-design: {baseline_design!r} is not among the designs", fix=did_you_mean(baseline_design, names)
        )
    loaded = load_trace(trace)
    traces = masks(loaded, tuple(dict.fromkeys(filters)), chosen, density, max_error)
    priced = "horowitz-45nm" if energy_table == "all" else energy_table
    comparison = compare_designs(chosen, loaded, traces, engine, priced, perfetto is not None, measure, run)
    results = [case.result for case in comparison.cases]
    if folder is not None:
        write_csv(results, folder)
    if perfetto is not None:
        write_perfetto(results, perfetto)
    if page is not None:
        write_page(comparison, budget, page)
    if as_json:
        print_json({"budget": budget, **comparison.as_dict()})
        return
    print_comparison(comparison, baseline_design, energy_table == "all")
    for path in (folder, perfetto, page):
        if path is not None:
            click.echo(f"\nwrote {path}")


def masks(
    trace: AttentionTrace,
    filters: Sequence[str],
    machines: Sequence[AcceleratorSpec],
    density: float,
    error: float | None,
) -> dict[str, dict[str, AttentionTrace]]:
    """The trace under each filter, for each machine by name; as it is for one that computes all pairs."""
    from thrifty.simulators.accelerator.design_filters import (
        EXACT,
        apply_design_filter,
        filter_within_error,
        uses_masks,
    )

    @cache
    def under(name: str) -> AttentionTrace:
        return apply_design_filter(trace, name, density) if error is None else filter_within_error(trace, name, error)

    traces = {}
    for name in filters:
        masking = [machine for machine in machines if name != "trace" and uses_masks(machine)]
        masked = {machine.name: under(machine.design if name == "own" else EXACT) for machine in masking}
        traces[name] = {machine.name: trace for machine in machines} | masked
    return traces


@click.command()
@click.argument("topology", type=click.Path(path_type=Path))
@click.option("--cfg", type=click.Path(path_type=Path), help="SCALE-Sim's architecture; 32 x 32, os, unless given.")
@click.option("--csv", "folder", type=click.Path(path_type=Path), help="Write COMPUTE_REPORT.csv into a folder.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def gemm(topology: Path, cfg: Path | None, folder: Path | None, as_json: bool) -> None:
    """Matrix products of a SCALE-Sim TOPOLOGY (Layer,M,N,K) on a systolic array, without stalls."""
    from thrifty.cli.simulate.simulate_output import print_table
    from thrifty.simulators.accelerator.accelerator_file import find_machine
    from thrifty.simulators.accelerator.scale_sim import compute_report, read_cfg, read_topology, write_report

    machine = find_machine("systolic") if cfg is None else read_cfg(cfg)
    rows = compute_report(read_topology(topology), machine)
    if folder is not None:
        write_report(rows, folder)
    if as_json:
        print_json({"settings": dict(machine.settings), "layers": rows})
        return
    shares = ("Overall Util %", "Mapping Efficiency %")
    lines = [[row["Layer"], f"{row['Total Cycles']:,}", *(f"{row[key]:.1f}" for key in shares)] for row in rows]
    print_table(["layer", "cycles", "utilisation %", "mapping %"], lines)


def read_budget(text: str | None) -> dict[str, float]:
    """`multipliers=128,clock=1e9,bandwidth=64e9` as numbers."""
    known, budget = ("multipliers", "clock", "bandwidth"), {}
    for word in filter(None, (text or "").split(",")):
        key, _, value = word.partition("=")
        refuse_unknown("--equal-resources: there is no budget of", key.strip(), known)
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not number > 0 or (key.strip() == "multipliers" and not number.is_integer()):
            raise UsageError(
                f"--equal-resources: {word!r} is no amount above zero", fix=f"for example {key.strip()}=128"
            )
        budget[key.strip()] = int(number) if key.strip() == "multipliers" else number
    return budget
