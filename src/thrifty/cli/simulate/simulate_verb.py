"""`thrifty simulate`: what a training step, attention or a sparse product would cost on hardware that is not here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from thrifty.cli.simulate.simulate_attention import attention, gemm
from thrifty.cli.simulate.simulate_paper import paper
from thrifty.cli.simulate.simulate_spgemm import spgemm

if TYPE_CHECKING:
    from thrifty.simulators.cluster.published_runs import PublishedRun
    from thrifty.simulators.cluster.step_report import StepReport
from dataclasses import asdict

from thrifty.cli.simulate.simulate_output import print_table
from thrifty.cli.verb_output import print_json


@click.group(name="simulate")
def command() -> None:
    """What a training step, attention or a sparse product would cost on hardware that is not here."""


command.add_command(attention)
command.add_command(gemm)
command.add_command(paper)
command.add_command(spgemm)


@command.command()
@click.option("--model", required=True, help="Preset, model folder, published model or published run.")
@click.option("--cluster", help="Name of a cluster, such as h100-roce; h100-box unless given.")
@click.option("--ranks", type=click.IntRange(1), help="Devices; as many as the mesh has, or the cluster.")
@click.option("--mesh", metavar="AXIS=N,…", help="Sizes of replicate, shard, tensor, pipeline; chunks of a rank.")
@click.option("--schedule", help="gpipe, 1f1b, interleaved, zero_bubble or zero_bubble_v.")
@click.option("--batch", type=click.IntRange(1), help="Effective batch: examples in a step.")
@click.option("--micro-batch", type=click.IntRange(1), help="Examples that go through a stage together.")
@click.option("--length", type=click.IntRange(1), help="Tokens in an example.")
@click.option("--recompute", type=click.Choice(["none", "selective", "every"]), help="What runs again going backward.")
@click.option("--zero", type=click.IntRange(0, 3), help="What ZeRO divides along shard.")
@click.option("--sequence-parallel/--no-sequence-parallel", default=None, help="Also divide what tensor does not.")
@click.option("--flash/--no-flash", default=True, help="Whether attention keeps no scores; for presets and folders.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write the timeline for ui.perfetto.dev.")
@click.option("--picture", type=click.Path(path_type=Path), help="Write the timeline as .png or .svg.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def cluster(
    model: str,
    cluster: str | None,
    ranks: int | None,
    mesh: str | None,
    length: int | None,
    flash: bool,
    trace: Path | None,
    picture: Path | None,
    as_json: bool,
    **changes: Any,
) -> None:
    """One training step of a model on a cluster: its seconds and where they go, memory on each rank, FLOP/s, MFU."""
    from thrifty.cli.simulate.cluster_options import find_workload, read_mesh, read_settings
    from thrifty.simulators.cluster.network_topology import find_cluster
    from thrifty.simulators.cluster.published_runs import RUNS
    from thrifty.simulators.cluster.simulated_step import simulate

    run = RUNS.get(model)
    place = cluster or (run.cluster if run else "h100-box")
    named = find_cluster(place)
    sizes = read_mesh(mesh, ranks, run, named.ranks)
    settings = read_settings(changes, run, sizes, named.device.flops)
    workload = run.workload if run else find_workload(model, length, flash)
    report = simulate(workload, named.of(ranks or sizes.ranks), sizes, settings)
    _write_timeline(report, trace, picture)
    if as_json:
        print_json({**report.as_dict(), "published": _compared(run, report) if run else None})
        return
    _tell(report, place)
    if run:
        off = _compared(run, report)["off"]
        click.echo(f"\n{run.paper}, {run.table}: {run.measure} {run.measured:.4g}, {off:+.1%} off")
    for path in (trace, picture):
        if path is not None:
            click.echo(f"wrote {path}")


@command.command("published")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def print_published_runs(as_json: bool) -> None:
    """Runs that were published, against what is simulated for them, each device with its fitted efficiencies."""
    published = anchors()
    if as_json:
        print_json(published)
        return
    print_table(
        ["run", "table", "ranks", "quantity", "measured", "simulated", "interval", "off"],
        [
            [
                row["run"],
                f"{row['paper'].partition(',')[0]}, {row['table']}",
                f"{row['ranks']:,}",
                row["quantity"],
                f"{row['measured']:.4g}",
                f"{row['simulated']:.4g}",
                " to ".join(f"{bound:.4g}" for bound in row["interval"]),
                f"{row['off']:+.1%}",
            ]
            for row in published["runs"]
        ],
    )
    for note in dict.fromkeys(
        f"{row['table']} of {row['paper']}: {row['note']}" for row in published["runs"] if row["note"]
    ):
        click.echo(f"\n{note}")


def anchors() -> dict[str, Any]:
    """Every published run with what is simulated for it, as plain data, and the constants."""

    from thrifty.simulators.cluster.device_efficiency import find_efficiency
    from thrifty.simulators.cluster.network_topology import find_cluster
    from thrifty.simulators.cluster.published_runs import RUNS

    devices = sorted({find_cluster(run.cluster).device.name for run in RUNS.values()})
    rates = {device: asdict(find_efficiency(device)) for device in devices}
    return {"rates": rates, "runs": [_compared(run, run.simulate()) for run in RUNS.values()]}


def _compared(run: PublishedRun, report: StepReport) -> dict[str, Any]:
    simulated = getattr(report, run.measure)
    return {
        "run": run.name,
        "paper": run.paper,
        "table": run.table,
        "ranks": run.mesh.ranks,
        "quantity": run.measure,
        "measured": run.measured,
        "simulated": simulated,
        "interval": list(report.interval(run.measure)),
        "off": simulated / run.measured - 1,
        "tolerance": run.tolerance,
        "fits": report.fits,
        "evidence": run.evidence,
        "note": run.note,
    }


def _write_timeline(report: StepReport, trace: Path | None, picture: Path | None) -> None:
    from thrifty.core.errors import UsageError
    from thrifty.reporting.chart_renderer import render_png, render_svg
    from thrifty.simulators.cluster.timeline_trace import LOOK, figure, write_trace

    if trace is not None:
        write_trace(report.timeline, trace)
    if picture is not None:
        kind = picture.suffix.removeprefix(".")
        if kind not in ("png", "svg"):
            raise UsageError(f"--picture {picture} is neither .png nor .svg", fix="name it so")
        title = f"{report.workload.name} on {report.mesh.ranks:,} ranks, {report.settings.schedule}"
        spec = figure(report.timeline, title)
        picture.write_bytes(render_png(spec, LOOK) if kind == "png" else render_svg(spec, LOOK).encode())


def _tell(report: StepReport, cluster: str) -> None:
    from thrifty.reporting.number_format import duration, percent, scaled

    mesh, settings = report.mesh, report.settings
    axes = ", ".join(f"{axis} {size}" for axis, size in asdict(mesh).items() if size > 1) or "no axis"
    click.echo(
        f"{report.workload.name}: {scaled(report.workload.parameters)} parameters on {mesh.ranks:,} ranks of {cluster} "
        f"({axes})\n{settings.batch:,} examples of {report.workload.length:,} tokens a step, "
        f"{report.micro_batches:,} micro-batches of {settings.micro_batch} through each pipeline, {settings.schedule}, "
        f"recompute {settings.recompute}, ZeRO {settings.zero}, {settings.number_format}\n"
    )
    spent = {"compute": "compute", "tensor": "tensor collectives", "bubble": "pipeline bubble"}
    spent |= {"transfers": "transfers, exposed", "data": "data collectives, exposed", "optimizer": "optimizer"}
    rows = [
        [title, duration(getattr(report.seconds, name)), percent(getattr(report.seconds, name) / report.step_seconds)]
        for name, title in spent.items()
    ]
    print_table(["step", "seconds", "share"], [*rows, ["total", duration(report.step_seconds), ""]])
    click.echo(
        f"\n{scaled(report.model_flops, 'FLOP/s')} a device, MFU {percent(report.mfu)}; with what is recomputed "
        f"{scaled(report.hardware_flops, 'FLOP/s')}, HFU {percent(report.hfu)}; "
        f"{scaled(report.tokens_per_second)} tokens/s"
    )
    steps, mfu, rate = (report.interval(name) for name in ("step_seconds", "mfu", "tokens_per_second"))
    click.echo(
        f"nine times out of ten: {duration(steps[0])} to {duration(steps[1])} a step, MFU {percent(mfu[0])} to "
        f"{percent(mfu[1])}, {scaled(rate[0])} to {scaled(rate[1])} tokens/s (from {report.rates.basis})\n"
    )
    chosen = {report.memory[0].rank: "first", report.memory[-1].rank: "last", report.fullest.rank: "fullest"}
    print_table(
        ["memory of pipeline rank", "weights", "gradients", "optimizer", "activations", "temporary", "total"],
        [
            [f"{rank} ({title})"]
            + [scaled(size, "B") for size in asdict(report.memory[rank].state).values()]
            + [scaled(getattr(report.memory[rank], name), "B") for name in ("activations", "temporary", "total")]
            for rank, title in sorted(chosen.items())
        ],
    )
    if not report.fits:
        click.echo(f"\nDOES NOT FIT: rank {report.fullest.rank} has {scaled(report.fullest.limit, 'B')}")
