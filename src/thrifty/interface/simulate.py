"""Costs on simulated hardware: a training step on a cluster, attention and matmuls on accelerators."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from thrifty.core.errors import UsageError, did_you_mean
from thrifty.core.user_objects import BuildModel
from thrifty.interface.cluster_simulation import (
    ClusterSimulation,
    PublishedRuns,
    find_workload,
    mesh_of,
    published_runs_table,
    settings_of,
)
from thrifty.interface.design_comparison import DesignComparison, Filter, compare_designs, masks_of
from thrifty.interface.design_page import write_page
from thrifty.interface.loaded_model import own_model
from thrifty.interface.matrix_products import GemmSimulation, SpgemmSimulation, describe_product
from thrifty.interface.published_accelerators import PublishedAccelerators, claimed_and_simulated
from thrifty.planning.cluster_file import read_cluster
from thrifty.simulators.accelerator.accelerator_file import changed_machines, find_machine
from thrifty.simulators.accelerator.accelerator_simulation import limit_resources, simulate_product
from thrifty.simulators.accelerator.result_export import write_csv, write_perfetto
from thrifty.simulators.accelerator.scale_sim import compute_report, read_cfg, read_topology, write_report
from thrifty.simulators.accelerator.spgemm_workload import measured, read_matrix, uniform
from thrifty.simulators.accelerator.trace_file import load_trace
from thrifty.simulators.cluster.published_runs import RUNS
from thrifty.simulators.cluster.simulated_step import simulate as simulate_step
from thrifty.simulators.cluster.workload import Recompute


def cluster(
    model: str | Path,
    *,
    cluster: str | None = None,
    ranks: int | None = None,
    mesh: Mapping[str, int] | None = None,
    schedule: str | None = None,
    batch: int | None = None,
    micro_batch: int | None = None,
    length: int | None = None,
    recompute: Recompute | None = None,
    zero: int | None = None,
    sequence_parallel: bool | None = None,
    flash: bool = True,
) -> ClusterSimulation:
    """Simulate a training step on a cluster: step time and its parts, memory of each rank, FLOP/s and MFU.

    Args:
        model: Preset, model folder, published model or published run. A published run sets the defaults of the other
            arguments.
        cluster: Name of a cluster, such as "h100-roce", or a file. The default is "h100-box".
        ranks: Number of devices. The default is the size of the mesh, or all devices of the cluster.
        mesh: Sizes of the axes "replicate", "shard", "tensor" and "pipeline", and number of "chunks" per pipeline rank.
        batch: Effective batch: number of examples per step, with `length` tokens each.
        micro_batch: Number of examples per micro-batch.
        schedule: "gpipe", "1f1b", "interleaved", "zero_bubble" or "zero_bubble_v".
        recompute: Operations to recompute in the backward pass.
        zero: ZeRO stage (0 to 3) along "shard".
        flash: False to store the attention scores of presets and folders.

    If the step exceeds the device's memory, the result reports it. Raises UsageError if sizes do not fit together.

    Example::

        step = thrifty.simulate.cluster("gpt3-175b", cluster="selene-a100", mesh={"tensor": 8, "pipeline": 8})
        print(step, step.report.mfu)
    """
    run = RUNS.get(str(model))
    place = cluster or (run.cluster if run else "h100-box")
    named = read_cluster(place)
    sizes = mesh_of(mesh, ranks, run, named.ranks)
    options = {"schedule": schedule, "batch": batch, "micro_batch": micro_batch, "recompute": recompute}
    options |= {"zero": zero, "sequence_parallel": sequence_parallel}
    changes = {name: value for name, value in options.items() if value is not None}
    settings = settings_of(changes, run, sizes, named.device.flops)
    workload = run.workload if run else find_workload(model, length, flash)
    return ClusterSimulation(simulate_step(workload, named.of(ranks or sizes.ranks), sizes, settings), place, run)


def published_runs() -> PublishedRuns:
    """Simulate published training runs, and compare the results with the published measurements.

    Example::

        print(thrifty.simulate.published_runs())
    """
    return published_runs_table()


def attention(
    trace: str | Path,
    designs: Sequence[str],
    *,
    equal_resources: Mapping[str, float] | None = None,
    engine: Literal["scan", "event"] = "scan",
    energy_table: str = "horowitz-45nm",
    filters: Sequence[Filter] = ("trace",),
    density: float = 0.2,
    max_error: float | None = None,
    run: Any = None,
    model: nn.Module | BuildModel | str | None = None,
    baseline_design: str | None = None,
    measure: bool = True,
    page: str | Path | None = None,
    csv: str | Path | None = None,
    perfetto: str | Path | None = None,
) -> DesignComparison:
    """Simulate the attention of a trace on accelerators: cycles, seconds, stalls, bytes, joules and mm².

    Args:
        trace: Trace file written by `thrifty.trace`.
        designs: Design names, TOML files, or names with changes such as "elsa:copies=2".
        equal_resources: Resources that are set equal for all designs: "multipliers", "clock" in Hz or "bandwidth" in
            bytes/s.
        engine: "scan", or "event", which also models latency and banks of the memory.
        energy_table: Table of energy per action. "all" compares all tables.
        filters: Sources of masks: "trace" (masks of the trace), "exact" (largest scores) or "own" (each design's
            filter).
        density: Fraction of query-key pairs that "exact" and "own" filters keep.
        max_error: Maximum relative error of the outputs. It replaces `density`.
        run: The traced run. Its held-out loss is measured with each mask. If the run trained your own
            model, pass this model as `model`.
        baseline_design: Design that the others are compared with, at equal peak operations per second.
        measure: False to skip the measurement on this machine.
        page, csv, perfetto: Outputs to write: offline HTML page, folder of tables, timeline.

    Raises UsageError if a design, resource or table is unknown.

    Example::

        thrifty.trace("runs", "masks.safetensors", density=0.2)
        print(thrifty.simulate.attention("masks.safetensors", ["elsa", "dense"], measure=False))
    """
    budget = dict(equal_resources or {})
    machines = [limit_resources(machine, **budget) for machine in changed_machines(designs)]
    names = [machine.name for machine in machines]
    if baseline_design is not None and baseline_design not in names:
        raise UsageError(
            f"the baseline design {baseline_design!r} is not one of the designs", did_you_mean(baseline_design, names)
        )
    loaded = load_trace(Path(trace))
    masks = masks_of(loaded, tuple(dict.fromkeys(filters)), machines, density, max_error)
    priced = "horowitz-45nm" if energy_table == "all" else energy_table
    objects = own_model(run, model)
    compared = compare_designs(
        machines, loaded, masks, engine, priced, draw=perfetto is not None, measure=measure, run=run, objects=objects
    )
    result = replace(compared, budget=budget, baseline=baseline_design, all_tables=energy_table == "all")
    results = [case.result for case in result.cases]
    if csv is not None:
        write_csv(results, Path(csv))
    if perfetto is not None:
        write_perfetto(results, Path(perfetto))
    if page is not None:
        write_page(result, Path(page))
    return result


def gemm(topology: str | Path, *, cfg: str | Path | None = None, csv: str | Path | None = None) -> GemmSimulation:
    """Simulate the matmuls of a SCALE-Sim topology (CSV with Layer, M, N, K) on a systolic array. Stalls are not
    simulated.

    `cfg` is SCALE-Sim's architecture file; the default is a 32 x 32 output-stationary array. `csv` is a folder for
    COMPUTE_REPORT.csv.

    Raises UsageError if a file is not in SCALE-Sim's format.

    Example::

        Path("layers.csv").write_text("Layer,M,N,K,\\nscores,512,512,64,\\n")
        print(thrifty.simulate.gemm("layers.csv"))
    """
    machine = find_machine("systolic") if cfg is None else read_cfg(Path(cfg))
    rows = compute_report(read_topology(Path(topology)), machine)
    if csv is not None:
        write_report(rows, Path(csv))
    return GemmSimulation(dict(machine.settings), tuple(rows))


def spgemm(
    *matrices: str | Path,
    size: int = 4986,
    density: float = 8e-3,
    seed: int = 0,
    designs: Sequence[str] = ("outerspace",),
    measure: bool = True,
    energy_table: str = "horowitz-45nm",
) -> SpgemmSimulation:
    """Simulate the product of each sparse matrix with itself on accelerators: cycles of the multiply and merge
    phases, bytes per operand, joules.

    `matrices` are Matrix Market files (.mtx). Without files, a random square matrix of `size` rows has a fraction
    `density` of nonzero values. `designs` are as in `attention`. `measure=False` skips the measurement on this machine.

    Raises UsageError if a design is unknown or a file contains no matrix.

    Example::

        print(thrifty.simulate.spgemm(size=200, density=0.02, measure=False))
    """
    machines = changed_machines(designs)
    products = [read_matrix(Path(path)) for path in matrices] or [uniform(size, density, seed)]
    described = []
    for product in products:
        here = measured(product) if measure else {"gustavson": None, "dense": None}
        for machine in machines:
            result = simulate_product(machine, product, table=energy_table)
            described.append(describe_product(product, result) | {"measured_here": here})
    return SpgemmSimulation(tuple(described))


def published_accelerators(*, page: str | Path | None = None) -> PublishedAccelerators:
    """Compare published results of accelerators with simulated results: grade of the evidence, and reason for the
    difference.

    `page` is the path of an offline HTML page to write.

    Example::

        print(thrifty.simulate.published_accelerators())
    """
    result = PublishedAccelerators(tuple(claimed_and_simulated()))
    if page is not None:
        result.write_page(Path(page))
    return result
