"""`thrifty simulate`: simulate the cost of a training step, attention or matmuls on hardware."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import OWN_MODEL
from thrifty.cli.verb_output import print_result

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
FILTERS = ("trace", "exact", "own")


@click.group(name="simulate")
def command() -> None:
    """Simulate a training step on a cluster, or attention or a matmul on an accelerator."""


@command.command()
@click.option("--model", required=True, help="Preset, model folder, published model or published run.")
@click.option("--cluster", help="Name or file of a cluster, such as h100-roce.  [default: h100-box]")
@click.option("--ranks", type=click.IntRange(1), help="Number of devices.  [default: size of the mesh, or all]")
@click.option("--mesh", metavar="AXIS=N,…", help="Axis sizes (replicate, shard, tensor, pipeline), and chunks.")
@click.option("--schedule", help="gpipe, 1f1b, interleaved, zero_bubble or zero_bubble_v.")
@click.option("--batch", type=click.IntRange(1), help="Examples per step (effective batch).")
@click.option("--micro-batch", type=click.IntRange(1), help="Examples per micro-batch.")
@click.option("--length", type=click.IntRange(1), help="Tokens per example.")
@click.option(
    "--recompute",
    type=click.Choice(["none", "selective", "every"]),
    help="Operations to recompute in the backward pass.",
)
@click.option("--zero", type=click.IntRange(0, 3), help="ZeRO stage along the shard axis.")
@click.option(
    "--sequence-parallel/--no-sequence-parallel",
    default=None,
    help="Also shard activations outside tensor-parallel layers.",
)
@click.option("--flash/--no-flash", default=True, help="Attention without stored scores (presets, folders).")
@click.option("--trace", type=click.Path(path_type=Path), help="Write the timeline for ui.perfetto.dev.")
@click.option("--figure", type=click.Path(path_type=Path), help="Write the timeline as .svg, .png or .pdf.")
@AS_JSON
def cluster(
    model: str, mesh: str | None, trace: Path | None, figure: Path | None, as_json: bool, **options: Any
) -> None:
    """Simulate one training step on a cluster: step time and its parts, memory of each rank, FLOP/s and MFU."""
    import thrifty

    simulated = thrifty.simulate.cluster(model, mesh=_table("--mesh", mesh), **options)
    if trace is not None:
        simulated.write_trace(trace)
    if figure is not None:
        simulated.figure().save(figure)
    print_result(simulated, as_json)


@command.command("published")
@AS_JSON
def print_published_runs(as_json: bool) -> None:
    """Compare published training runs with simulated runs, per device with fitted efficiencies."""
    import thrifty

    print_result(thrifty.simulate.published_runs(), as_json)


@command.command()
@click.option(
    "--designs",
    required=True,
    metavar="NAME,…",
    help="Accelerator names or TOML files; NAME:KEY=VALUE changes a setting.",
)
@click.option("--trace", required=True, type=click.Path(path_type=Path), help="Output of `thrifty trace`.")
@click.option(
    "--equal-resources",
    metavar="KEY=VALUE,…",
    help="Same multipliers, clock (Hz) or bandwidth (bytes/s) for all designs.",
)
@click.option("--engine", default="scan", show_default=True, help="scan, or event (adds memory latency and banks).")
@click.option(
    "--energy-table", default="horowitz-45nm", show_default=True, help="Energy per action; all: print every table."
)
@click.option(
    "--filter",
    "filters",
    type=click.Choice(FILTERS),
    multiple=True,
    default=("trace",),
    show_default=True,
    help="Masks of the trace, of the largest exact scores, or of each design's own filter. Repeatable.",
)
@click.option(
    "--density",
    type=float,
    default=0.2,
    show_default=True,
    help="Fraction of pairs that the filters exact and own keep.",
)
@click.option("--max-error", type=float, help="Maximum relative error of the outputs, instead of --density.")
@click.option("--run", type=click.Path(path_type=Path), help="Traced run, to measure its held-out loss with each mask.")
@OWN_MODEL
@click.option(
    "--baseline-design", metavar="NAME", help="Design with which all other designs are compared at equal peak."
)
@click.option("--measure/--no-measure", default=True, help="Also time the same attention on this machine.")
@click.option("--page", type=click.Path(path_type=Path), help="Write tables and charts as one offline page.")
@click.option("--csv", type=click.Path(path_type=Path), help="Write reports and action counts to a folder.")
@click.option("--perfetto", type=click.Path(path_type=Path), help="Write the timeline for ui.perfetto.dev.")
@AS_JSON
def attention(designs: str, trace: Path, equal_resources: str | None, as_json: bool, **options: Any) -> None:
    """Simulate the attention of a trace on several designs: cycles, time, stalls, bytes, energy and area.

    Designs use the masks of the trace, or masks computed from its queries and keys. The error of computed masks is
    printed.
    """
    import thrifty

    budget = _table("--equal-resources", equal_resources)
    print_result(thrifty.simulate.attention(trace, _names(designs), equal_resources=budget, **options), as_json)


@command.command()
@click.argument("topology", type=click.Path(path_type=Path))
@click.option(
    "--cfg", type=click.Path(path_type=Path), help="SCALE-Sim architecture file.  [default: 32 x 32, output-stationary]"
)
@click.option("--csv", type=click.Path(path_type=Path), help="Write COMPUTE_REPORT.csv to a folder.")
@AS_JSON
def gemm(topology: Path, cfg: Path | None, csv: Path | None, as_json: bool) -> None:
    """Simulate the matmuls of a SCALE-Sim TOPOLOGY (Layer,M,N,K) on a systolic array. Stalls are not simulated."""
    import thrifty

    print_result(thrifty.simulate.gemm(topology, cfg=cfg, csv=csv), as_json)


@command.command()
@click.option("--page", type=click.Path(path_type=Path), help="Also write the tables as one offline page.")
@AS_JSON
def paper(page: Path | None, as_json: bool) -> None:
    """Compare published results of accelerators with simulated results, and explain each deviation.

    Unverified published values are left out.
    """
    import thrifty

    print_result(thrifty.simulate.published_accelerators(page=page), as_json)


@command.command()
@click.argument("matrices", nargs=-1, type=click.Path(path_type=Path))
@click.option("--size", type=click.IntRange(1), default=4986, show_default=True, help="Rows of a random matrix.")
@click.option("--density", type=float, default=8e-3, show_default=True, help="Density of a random matrix.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--designs", default="outerspace", show_default=True, help="Accelerators; NAME:KEY=VALUE changes a setting."
)
@click.option("--measure/--no-measure", default=True, help="Also time the matmul on this machine.")
@click.option("--energy-table", default="horowitz-45nm", show_default=True, help="Energy per action.")
@AS_JSON
def spgemm(matrices: tuple[Path, ...], designs: str, as_json: bool, **options: Any) -> None:
    """Simulate the sparse product of each of the MATRICES (Matrix Market files, .mtx) with itself. Without files, a
    random matrix is used.

    Prints cycles of both phases, bytes per operand, energy, and the time of this machine in separate columns.
    """
    import thrifty

    print_result(thrifty.simulate.spgemm(*matrices, designs=_names(designs), **options), as_json)


def _names(words: str) -> list[str]:
    return [name for name in words.split(",") if name]


def _table(option: str, words: str | None) -> dict[str, Any] | None:
    from thrifty.recipes.recipe_layers import toml_table

    return None if words is None else toml_table(words, words, option, "")
