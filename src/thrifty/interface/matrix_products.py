"""Simulated matmuls: sparse matmuls on accelerators, dense matmuls on a systolic array."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from thrifty.interface.design_comparison import format_joules
from thrifty.reporting.number_format import MISSING, duration, percent, scaled
from thrifty.reporting.printed_result import PrintedResult, lines, number_table
from thrifty.simulators.accelerator.designs.outerspace import traffic
from thrifty.simulators.accelerator.simulation_result import SimulationResult
from thrifty.simulators.accelerator.spgemm_workload import SpgemmProduct

ABOUT = (
    "\nSimulated times are for the accelerator. Measured times are from this CPU: scipy (row by row, one\n"
    "thread) and dense numpy. The paper compares with libraries and processors of 2017."
)


@dataclass(frozen=True, repr=False)
class GemmSimulation(PrintedResult):
    """Matmuls on a systolic array, and the settings of the array. Each matmul is one row with SCALE-Sim's columns."""

    settings: Mapping[str, Any]
    layers: tuple[Mapping[str, Any], ...]

    def as_dict(self) -> dict[str, Any]:
        return {"settings": dict(self.settings), "layers": list(self.layers)}

    def __rich__(self) -> RenderableType:
        shares = ("Overall Util %", "Mapping Efficiency %")
        rows = [
            [row["Layer"], f"{row['Total Cycles']:,}", *(f"{row[key]:.1f}" for key in shares)] for row in self.layers
        ]
        return number_table(["layer", "cycles", "utilization %", "mapping %"], rows)


@dataclass(frozen=True, repr=False)
class SpgemmSimulation(PrintedResult):
    """Sparse matmuls on accelerators, one row per matrix and design."""

    products: tuple[Mapping[str, Any], ...]

    def as_dict(self) -> dict[str, Any]:
        return {"products": list(self.products)}

    def __rich__(self) -> RenderableType:
        titles = ["matrix", "design", "products", "results", "multiply", "merge", "simulated", "rate", "energy"]
        moved = [
            [
                row["matrix"],
                *(scaled(size, "B") for size in row["traffic"].values()),
                f"{row['traffic_over_least']:.2f}",
            ]
            for row in self.products
        ]
        stalls = [
            [row["matrix"], name, *(percent(time[kind] / max(sum(time.values()), 1)) for kind in time)]
            for row in self.products
            for name, time in row["stations"].items()
        ]
        return lines(
            number_table([*titles, "here, Gustavson", "here, dense"], [_cells(row) for row in self.products]),
            "",
            number_table(["bytes", "A", "B", "products", "result", "relative to the minimum"], moved),
            "",
            number_table(["matrix", "station", "busy", "starved", "blocked"], stalls),
            ABOUT,
            *dict.fromkeys(note for row in self.products for note in row["notes"]),
        )


def _cells(row: Mapping[str, Any]) -> list[str]:
    layers = {layer["layer"]: layer["cycles"] / row["clock"] for layer in row["layers"]}
    return [
        row["matrix"],
        row["machine"],
        scaled(row["multiplies"]),
        scaled(row["found"]),
        *(duration(layers[name]) for name in ("multiply", "merge")),
        duration(row["seconds"]),
        scaled(row["operations_per_second"], "op/s"),
        format_joules(row["energy_by_activity"]),
        *(MISSING if took is None else duration(took) for took in row["measured_here"].values()),
    ]


def describe_product(product: SpgemmProduct, result: SimulationResult) -> dict[str, Any]:
    """Return a simulated sparse matmul as plain data."""
    moved = traffic(product, result.machine)
    return {
        "matrix": product.name,
        "shape": list(product.a.shape),
        "numbers": product.a.nnz,
        "multiplies": product.multiplies,
        "adds": product.adds,
        "found": int(product.result_counts.sum()),
        "traffic": moved,
        "traffic_over_least": sum(moved.values()) / (moved["A"] + moved["B"] + moved["Z"]),
        "operations_per_second": 2 * product.multiplies / result.seconds,
        **result.as_dict(),
    }
