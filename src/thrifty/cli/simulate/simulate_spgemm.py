"""`thrifty simulate spgemm`: sparse matrices multiplied on accelerators made for that, beside this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from thrifty.simulators.accelerator.simulation_result import SimulationResult
    from thrifty.simulators.accelerator.spgemm_workload import SpgemmProduct


@click.command()
@click.argument("matrices", nargs=-1, type=click.Path(path_type=Path))
@click.option("--size", type=click.IntRange(1), default=4986, show_default=True, help="Rows of a random matrix.")
@click.option("--density", type=float, default=8e-3, show_default=True, help="Of a random matrix: share of numbers.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--designs", default="outerspace", show_default=True, help="Machines; NAME:KEY=VALUE sets.")
@click.option("--measure/--no-measure", default=True, help="Whether to time the product on this machine too.")
@click.option("--energy-table", default="horowitz-45nm", show_default=True, help="Energies of counted actions.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def spgemm(
    matrices: tuple[Path, ...],
    size: int,
    density: float,
    seed: int,
    designs: str,
    measure: bool,
    energy_table: str,
    as_json: bool,
) -> None:
    """The product of each of the MATRICES (Matrix Market files, .mtx) with itself, or of a random one: cycles of both
    phases, bytes by operand, energy; beside it, as columns of their own, what this machine takes now."""
    from thrifty.cli.simulate.machine_options import read_machine_options
    from thrifty.cli.verb_output import print_words
    from thrifty.core.errors import UsageError
    from thrifty.simulators.accelerator.accelerator_simulation import simulate_product
    from thrifty.simulators.accelerator.spgemm_workload import measured, read_matrix, uniform

    machines = [read_machine_options(words) for words in designs.split(",") if words]
    if not machines:
        raise UsageError("no design was named", fix="for example --designs outerspace")
    products = [read_matrix(path) for path in matrices] or [uniform(size, density, seed)]
    descriptions = []
    for product in products:
        here = measured(product) if measure else {"gustavson": None, "dense": None}
        for machine in machines:
            result = simulate_product(machine, product, table=energy_table)
            descriptions.append(describe_product(product, result) | {"measured_here": here})
    print_words({"products": descriptions}, lambda: _tell(descriptions), as_json)


def describe_product(product: SpgemmProduct, result: SimulationResult) -> dict[str, Any]:
    """A product on a machine, as plain data."""
    from thrifty.simulators.accelerator.designs.outerspace import traffic

    moved = traffic(product, result.machine)
    return {
        "matrix": product.name,
        "shape": list(product.a.shape),
        "numbers": product.a.nnz,
        "multiplies": product.multiplies,
        "adds": product.adds,
        "found": int(product.found.sum()),
        "traffic": moved,
        "traffic_over_least": sum(moved.values()) / (moved["A"] + moved["B"] + moved["Z"]),
        "operations_per_second": 2 * product.multiplies / result.seconds,
        **result.as_dict(),
    }


def _tell(products: list[dict[str, Any]]) -> None:
    from thrifty.cli.simulate.simulate_output import format_joules, print_table
    from thrifty.reporting.number_format import MISSING, duration, percent, scaled

    rows = []
    for row in products:
        layers = {layer["layer"]: layer["cycles"] / row["clock"] for layer in row["layers"]}
        here = [MISSING if took is None else duration(took) for took in row["measured_here"].values()]
        rows.append(
            [
                row["matrix"],
                row["machine"],
                scaled(row["multiplies"]),
                scaled(row["found"]),
                *(duration(layers[name]) for name in ("multiply", "merge")),
                duration(row["seconds"]),
                scaled(row["operations_per_second"], "op/s"),
                format_joules(row["energy_by_activity"]),
                *here,
            ]
        )
    titles = ["matrix", "design", "products", "results", "multiply", "merge", "simulated", "rate", "energy"]
    print_table([*titles, "here, Gustavson", "here, dense"], rows)
    click.echo()
    moved = [
        [row["matrix"], *(scaled(size, "B") for size in row["traffic"].values()), f"{row['traffic_over_least']:.2f}"]
        for row in products
    ]
    print_table(["bytes", "A", "B", "products", "result", "over the least"], moved)
    click.echo()
    stalls = [
        [row["matrix"], name, *(percent(time[kind] / max(sum(time.values()), 1)) for kind in time)]
        for row in products
        for name, time in row["stations"].items()
    ]
    print_table(["matrix", "station", "busy", "starved", "blocked"], stalls)
    click.echo(
        "\nSimulated is the accelerator; here is this machine's processor now, by scipy (row by row, one thread) and\n"
        "by numpy, zeros and all. Ratios of the two are not the paper's, which timed libraries and processors of 2017."
    )
    for note in dict.fromkeys(note for row in products for note in row["notes"]):
        click.echo(note)
