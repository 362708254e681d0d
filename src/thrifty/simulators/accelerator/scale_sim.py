"""Input files of SCALE-Sim for the systolic array: an architecture (.cfg) and a topology of matrix products (CSV).

As in SCALE-Sim, cycles exclude stalls. Buffer stalls at limited bandwidth are not simulated. Only the minimum cycles to
transfer all words are reported."""

import configparser
import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thrifty.core.errors import UsageError, refuse_unknown
from thrifty.simulators.accelerator.accelerator_file import find_machine
from thrifty.simulators.accelerator.accelerator_spec import AcceleratorMemory, AcceleratorSpec
from thrifty.simulators.accelerator.designs.systolic import DATAFLOWS, folds, reported_cycles
from thrifty.simulators.accelerator.result_export import write_rows

MOST = 10**17
"""Maximum number of multiplications per layer."""


@dataclass(frozen=True)
class GemmShape:
    """Sizes m, n and k of a matrix product (m, k) x (k, n)."""

    name: str
    m: int
    n: int
    k: int


def read_cfg(path: Path) -> AcceleratorSpec:
    """Return the systolic array of a .cfg file: height, width, dataflow, and optional bandwidth in words per cycle.

    Raises UsageError if the file is invalid or a value cannot be simulated.
    """
    parser = configparser.ConfigParser()
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
        presets = dict(parser["architecture_presets"])
        rows, columns = int(presets["arrayheight"]), int(presets["arraywidth"])
        words = [float(word) for word in presets.get("bandwidth", "").split(",") if word.strip()]
    except (OSError, UnicodeDecodeError, configparser.Error, KeyError, ValueError) as error:
        raise UsageError(
            f"'{path}' cannot be read as a SCALE-Sim architecture: {error}",
            fix="add [architecture_presets] with ArrayHeight, ArrayWidth and Dataflow",
        ) from error
    dataflow = presets.get("dataflow", "os").strip()
    refuse_unknown(f"'{path}': there is no dataflow", dataflow, DATAFLOWS)
    for name, value, most in (
        ("ArrayHeight", rows, 2**20), ("ArrayWidth", columns, 2**20), ("Bandwidth", min(words, default=1), 1e12)
    ):  # fmt: skip
        if not 0 < value <= most:
            raise UsageError(f"'{path}': {name} is {value:g}", fix=f"set a value above zero and at most {most:g}")
    if parser.has_section("sparsity") and parser["sparsity"].get("sparsitysupport", "false").strip().lower() == "true":
        raise UsageError(f"'{path}': 'SparsitySupport' is not simulated", fix="write SparsitySupport : false")
    machine = find_machine("systolic")
    for setting, value in {"rows": rows, "columns": columns, "dataflow": dataflow}.items():
        machine = machine.replaced(setting, value)
    if words:
        machine = machine.with_bandwidth(min(words) * machine.clock * machine.number("bits") / 8)
    return machine


def read_topology(path: Path) -> list[GemmShape]:
    """Read matrix products from a CSV with columns Layer, M, N, K. Raises UsageError that names an invalid line."""
    try:
        lines = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(
            f"'{path}' cannot be read as a topology: {error}", fix="pass a CSV file that begins with Layer,M,N,K"
        ) from error
    titles = [word.strip().lower() for word in lines[0]] if lines else []
    if titles[:4] != ["layer", "m", "n", "k"]:
        raise UsageError(f"'{path}' is not a topology of matrix products", fix="begin it with the line Layer,M,N,K")
    if further := [title for title in titles[4:] if title]:
        raise UsageError(f"'{path}' has a column {further[0]!r}, which is not simulated", fix="remove the column")
    layers = []
    for number, line in enumerate(lines[1:], 2):
        if not any(word.strip() for word in line):
            continue
        words = [word.strip() for word in line[:4]]
        if len(words) < 4 or not all(word.isascii() and word.isdigit() and int(word) for word in words[1:]):
            raise UsageError(
                f"'{path}', line {number}: {','.join(line)!r} is not a layer", fix="write NAME,M,N,K with sizes >= 1"
            )
        if math.prod(map(int, words[1:])) > MOST:
            raise UsageError(
                f"'{path}', line {number}: {','.join(line)!r} is too large", fix=f"write M·N·K up to {MOST:.0e}"
            )
        layers.append(GemmShape(words[0], *map(int, words[1:])))
    if not layers:
        raise UsageError(f"'{path}' has no layers", fix="add a line NAME,M,N,K for each layer")
    return layers


def compute_report(layers: Sequence[GemmShape], machine: AcceleratorSpec) -> list[dict[str, Any]]:
    """Return one row per matrix product, with the columns of SCALE-Sim's report."""
    rows, columns = int(machine.number("rows")), int(machine.number("columns"))
    dataflow = str(machine.settings["dataflow"])
    per_byte = machine.clock / machine.memories.get("dram", AcceleratorMemory("dram")).bandwidth
    report = []
    for number, layer in enumerate(layers):
        cycles = int(reported_cycles(layer.m, layer.n, layer.k, rows, columns, dataflow))
        count, _ = folds(layer.m, layer.n, layer.k, rows, columns, dataflow)
        mapped = {"os": layer.m * layer.n, "ws": layer.k * layer.n, "is": layer.k * layer.m}[dataflow]
        words = layer.m * layer.k + layer.k * layer.n + layer.m * layer.n
        macs = layer.m * layer.n * layer.k
        report.append(
            {
                "LayerID": number,
                "Layer": layer.name,
                "Total Cycles": cycles,
                "Overall Util %": 100 * macs / (max(cycles, 1) * rows * columns),
                "Mapping Efficiency %": 100 * mapped / (int(count) * rows * columns),
                "Least Cycles of Words": words * machine.number("bits") / 8 * per_byte,
            }
        )
    return report


def write_report(rows: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Write COMPUTE_REPORT.csv with one row per matrix product. Return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_rows(folder / "COMPUTE_REPORT.csv", rows)
