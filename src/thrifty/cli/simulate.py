"""`thrifty simulate`: what a training step, attention or a matrix product would cost on hardware that is not here."""

from pathlib import Path
from typing import Any

import click

from thrifty.cli.recipe_options import OWN_MODEL
from thrifty.cli.verb_output import print_result

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
FILTERS = ("trace", "exact", "own")


@click.group(name="simulate")
def command() -> None:
    """Predicted cost of a training step, attention or a sparse product on hardware that is not here."""


@command.command()
@click.option("--model", required=True, help="Preset, model folder, published model or published run.")
@click.option("--cluster", help="Name or file of a cluster, such as h100-roce; h100-box unless given.")
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
@click.option("--picture", type=click.Path(path_type=Path), help="Write the timeline as .svg, .png or .pdf.")
@AS_JSON
def cluster(
    model: str, mesh: str | None, trace: Path | None, picture: Path | None, as_json: bool, **options: Any
) -> None:
    """One training step of a model on a cluster: its seconds and where they go, memory on each rank, FLOP/s, MFU."""
    import thrifty

    simulated = thrifty.simulate.cluster(model, mesh=_table("--mesh", mesh), **options)
    if trace is not None:
        simulated.write_trace(trace)
    if picture is not None:
        simulated.figure().save(picture)
    print_result(simulated, as_json)


@command.command("published")
@AS_JSON
def print_published_runs(as_json: bool) -> None:
    """Runs that were published, against what is simulated for them, each device with its fitted efficiencies."""
    import thrifty

    print_result(thrifty.simulate.published_runs(), as_json)


@command.command()
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
@OWN_MODEL
@click.option(
    "--baseline-design", metavar="NAME", help="One of the designs, to tell why others are faster at equal peak."
)
@click.option("--measure/--no-measure", default=True, help="Whether to time the same attention on this machine too.")
@click.option("--page", type=click.Path(path_type=Path), help="Write tables and charts as one offline page.")
@click.option("--csv", type=click.Path(path_type=Path), help="Write reports and action counts into a folder.")
@click.option("--perfetto", type=click.Path(path_type=Path), help="Write a timeline for ui.perfetto.dev.")
@AS_JSON
def attention(designs: str, trace: Path, equal_resources: str | None, as_json: bool, **options: Any) -> None:
    """Attention of a trace on several designs: cycles, seconds, stalls, bytes, energy, area. All are given the masks of
    the trace, or others that are found from its queries and keys; then also what that costs in accuracy."""
    import thrifty

    budget = _table("--equal-resources", equal_resources)
    print_result(thrifty.simulate.attention(trace, _names(designs), equal_resources=budget, **options), as_json)


@command.command()
@click.argument("topology", type=click.Path(path_type=Path))
@click.option("--cfg", type=click.Path(path_type=Path), help="SCALE-Sim's architecture; 32 x 32, os, unless given.")
@click.option("--csv", type=click.Path(path_type=Path), help="Write COMPUTE_REPORT.csv into a folder.")
@AS_JSON
def gemm(topology: Path, cfg: Path | None, csv: Path | None, as_json: bool) -> None:
    """Matrix products of a SCALE-Sim TOPOLOGY (Layer,M,N,K) on a systolic array, without stalls."""
    import thrifty

    print_result(thrifty.simulate.gemm(topology, cfg=cfg, csv=csv), as_json)


@command.command()
@click.option("--page", type=click.Path(path_type=Path), help="Write all of it as one offline page too.")
@AS_JSON
def paper(page: Path | None, as_json: bool) -> None:
    """Published figures of accelerators, ours next to each, how far off it is and why. Figures from memory are left
    out."""
    import thrifty

    print_result(thrifty.simulate.published_accelerators(page=page), as_json)


@command.command()
@click.argument("matrices", nargs=-1, type=click.Path(path_type=Path))
@click.option("--size", type=click.IntRange(1), default=4986, show_default=True, help="Rows of a random matrix.")
@click.option("--density", type=float, default=8e-3, show_default=True, help="Of a random matrix: share of numbers.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--designs", default="outerspace", show_default=True, help="Machines; NAME:KEY=VALUE sets.")
@click.option("--measure/--no-measure", default=True, help="Whether to time the product on this machine too.")
@click.option("--energy-table", default="horowitz-45nm", show_default=True, help="Energies of counted actions.")
@AS_JSON
def spgemm(matrices: tuple[Path, ...], designs: str, as_json: bool, **options: Any) -> None:
    """The product of each of the MATRICES (Matrix Market files, .mtx) with itself, or of a random one: cycles of both
    phases, bytes by operand, energy; and, in columns of their own, what this machine takes now."""
    import thrifty

    print_result(thrifty.simulate.spgemm(*matrices, designs=_names(designs), **options), as_json)


def _names(words: str) -> list[str]:
    return [name for name in words.split(",") if name]


def _table(option: str, words: str | None) -> dict[str, Any] | None:
    from thrifty.recipes.recipe_layers import toml_table

    return None if words is None else toml_table(words, words, option, "")
