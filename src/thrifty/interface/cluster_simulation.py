"""Simulation of a training step on a cluster, and a table of published runs with their simulated values."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from thrifty.core.errors import RefusedError, UsageError, did_you_mean
from thrifty.core.plain_values import build
from thrifty.models.families import assemble
from thrifty.models.model_presets import PRESETS
from thrifty.models.weight_conversion import folder_shape
from thrifty.reporting.number_format import duration, percent, scaled
from thrifty.reporting.printed_result import PrintedResult, lines, number_table
from thrifty.reporting.saved_chart import SavedChart
from thrifty.simulators.cluster.closed_form_workload import transformer
from thrifty.simulators.cluster.cluster_mesh import ClusterMesh, StepSettings
from thrifty.simulators.cluster.device_efficiency import find_efficiency
from thrifty.simulators.cluster.network_topology import find_cluster
from thrifty.simulators.cluster.published_runs import MODELS, RUNS, PublishedRun
from thrifty.simulators.cluster.step_report import StepReport
from thrifty.simulators.cluster.timeline_trace import figure, write_trace
from thrifty.simulators.cluster.traced_workload import trace_workload
from thrifty.simulators.cluster.workload import Workload

CONTEXT = 8192
"""Default maximum number of tokens per example, for models with a longer context."""
SPENT = {
    "compute": "compute",
    "tensor": "tensor collectives",
    "bubble": "pipeline bubble",
    "transfers": "transfers, exposed",
    "data": "data collectives, exposed",
    "optimizer": "optimizer",
}


@dataclass(frozen=True, repr=False)
class ClusterSimulation(PrintedResult):
    """A simulated training step: step time and its parts, memory of each rank, FLOP/s and MFU."""

    report: StepReport
    cluster: str
    published: PublishedRun | None = None
    """The published run that was simulated, if any."""

    def figure(self) -> SavedChart:
        """Return a chart of the timeline of all pipeline ranks."""
        report = self.report
        title = f"{report.workload.name} on {report.mesh.ranks:,} ranks, {report.settings.schedule}"
        return SavedChart(figure(report.timeline, title))

    def write_trace(self, file: str | Path) -> None:
        """Write the timeline as JSON for ui.perfetto.dev."""
        write_trace(self.report.timeline, Path(file))

    def as_dict(self) -> dict[str, Any]:
        published = published_row(self.published, self.report) if self.published else None
        return {**self.report.as_dict(), "published": published}

    def __rich__(self) -> RenderableType:
        report = self.report
        mesh, settings, workload = report.mesh, report.settings, report.workload
        axes = ", ".join(f"{axis} {size}" for axis, size in asdict(mesh).items() if size > 1) or "no axis"
        head = (
            f"{workload.name}: {scaled(workload.parameters)} parameters on {mesh.ranks:,} ranks of {self.cluster} "
            f"({axes})\n{settings.batch:,} examples of {workload.length:,} tokens a step, "
            f"{report.micro_batches:,} micro-batches of {settings.micro_batch} through each pipeline, "
            f"{settings.schedule}, recompute {settings.recompute}, ZeRO {settings.zero}, {settings.number_format}\n"
        )
        seconds = {title: getattr(report.seconds, name) for name, title in SPENT.items()}
        rows = [[title, duration(each), percent(each / report.step_seconds)] for title, each in seconds.items()]
        steps, mfu, rate = (report.interval(name) for name in ("step_seconds", "mfu", "tokens_per_second"))
        rates = (
            f"\n{scaled(report.model_flops, 'FLOP/s')} a device, MFU {percent(report.mfu)}; with recomputation "
            f"{scaled(report.hardware_flops, 'FLOP/s')}, HFU {percent(report.hfu)}; "
            f"{scaled(report.tokens_per_second)} tokens/s\n"
            f"90 % interval: {duration(steps[0])} to {duration(steps[1])} a step, MFU {percent(mfu[0])} to "
            f"{percent(mfu[1])}, {scaled(rate[0])} to {scaled(rate[1])} tokens/s (from {report.rates.basis})\n"
        )
        printed = [
            head,
            number_table(["step", "seconds", "share"], [*rows, ["total", duration(report.step_seconds), ""]]),
        ]
        printed += [rates, self._memory()]
        if not report.fits:
            printed.append(f"\nDOES NOT FIT: rank {report.fullest.rank} has {scaled(report.fullest.limit, 'B')}")
        if run := self.published:
            off = published_row(run, report)["off"]
            printed.append(f"\n{run.paper}, {run.table}: {run.measure} {run.measured:.4g}, {off:+.1%} off")
        return lines(*printed)

    def _memory(self) -> RenderableType:
        memory = self.report.memory
        chosen = {memory[0].rank: "first", memory[-1].rank: "last", self.report.fullest.rank: "fullest"}
        rows = [
            [f"{rank} ({title})"]
            + [scaled(size, "B") for size in asdict(memory[rank].state).values()]
            + [scaled(getattr(memory[rank], name), "B") for name in ("activations", "temporary", "total")]
            for rank, title in sorted(chosen.items())
        ]
        head = ["memory of pipeline rank", "weights", "gradients", "optimizer", "activations", "temporary", "total"]
        return number_table(head, rows)


@dataclass(frozen=True, repr=False)
class PublishedRuns(PrintedResult):
    """Published runs with simulated values, and the fitted efficiencies of each device."""

    rates: Mapping[str, Mapping[str, Any]]
    runs: tuple[Mapping[str, Any], ...]

    def as_dict(self) -> dict[str, Any]:
        return {"rates": self.rates, "runs": list(self.runs)}

    def __rich__(self) -> RenderableType:
        rows = [
            [
                row["run"],
                f"{row['paper'].partition(',')[0]}, {row['table']}",
                f"{row['ranks']:,}",
                row["quantity"],
                *(f"{row[key]:.4g}" for key in ("measured", "simulated")),
                " to ".join(f"{bound:.4g}" for bound in row["interval"]),
                f"{row['off']:+.1%}",
            ]
            for row in self.runs
        ]
        head = ["run", "table", "ranks", "quantity", "measured", "simulated", "interval", "off"]
        notes = (f"\n{row['table']} of {row['paper']}: {row['note']}" for row in self.runs if row["note"])
        return lines(number_table(head, rows), *dict.fromkeys(notes))


def published_runs_table() -> PublishedRuns:
    """Simulate every published run with the constants of its device."""
    devices = sorted({find_cluster(run.cluster).device.name for run in RUNS.values()})
    rates = {device: asdict(find_efficiency(device)) for device in devices}
    return PublishedRuns(rates, tuple(published_row(run, run.simulate()) for run in RUNS.values()))


def published_row(run: PublishedRun, report: StepReport) -> dict[str, Any]:
    """Return a published run as plain data, with its measured and its simulated value."""
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


def find_workload(model: str | Path, length: int | None, flash: bool) -> Workload:
    """Return the workload of a published model, a preset or a model folder. Presets and folders are traced."""
    name = str(model)
    if name in MODELS:
        sizes = MODELS[name]
        return transformer(name, replace(sizes, length=length or sizes.length))
    shape, folder = PRESETS.get(name), Path(model)
    if shape is None and folder.is_dir():
        try:
            shape = folder_shape(folder, fresh=True)
        except RefusedError:  # an architecture that only transformers implements
            return _from_transformers(folder, length or CONTEXT, flash)
    if shape is None:
        raise UsageError(f"there is no model {name!r}", fix=did_you_mean(name, [*PRESETS, *MODELS, *RUNS]))
    length = length or min(shape.length, CONTEXT)
    shape = replace(shape, length=max(length, shape.length))
    return trace_workload(folder.name, lambda: assemble(shape), length, flash=flash)


def _from_transformers(folder: Path, length: int, flash: bool) -> Workload:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"'{folder}' requires the package transformers", fix="pip install 'thrifty[huggingface]'"
        ) from error
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    config.use_cache = False
    make = transformers.AutoModelForCausalLM.from_config
    return trace_workload(folder.name, lambda: make(config, trust_remote_code=False), length, flash=flash)


def mesh_of(
    sizes: Mapping[str, int] | None, ranks: int | None, run: PublishedRun | None, all_ranks: int
) -> ClusterMesh:
    """Return a mesh with the passed axis sizes. The `replicate` axis contains the remaining ranks."""
    if sizes is None and run is not None and ranks in (None, run.mesh.ranks):
        return run.mesh
    mesh = build(ClusterMesh, dict(sizes or {}), "mesh")
    if sizes and "replicate" in sizes:
        return mesh
    ranks = ranks or (mesh.ranks if sizes and "shard" in sizes else all_ranks)
    if ranks > mesh.ranks and ranks % mesh.ranks:
        fitting = ranks - ranks % mesh.ranks
        raise UsageError(f"{ranks} ranks are not a multiple of the mesh's {mesh.ranks} ranks", fix=f"--ranks {fitting}")
    return replace(mesh, replicate=max(ranks // mesh.ranks, 1))


def settings_of(
    changes: Mapping[str, Any], run: PublishedRun | None, mesh: ClusterMesh, formats: Mapping[str, float]
) -> StepSettings:
    """Return the settings of the published run, or the defaults, updated with `changes`."""
    if run is not None:
        return replace(run.settings, **changes)
    plain = StepSettings(
        # with 4 micro-batches per stage the bubble of a plain pipeline is about 1/5 of the step
        batch=mesh.data * changes.get("micro_batch", 1) * (4 * mesh.pipeline if mesh.pipeline > 1 else 1),
        schedule="interleaved" if mesh.chunks > 1 else "1f1b",
        number_format=next(name for name in ("bfloat16", "float16", "float32") if name in formats),
    )
    return replace(plain, **changes)
