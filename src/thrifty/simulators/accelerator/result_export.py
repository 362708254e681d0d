"""Exports of results: CSV files, operation counts in YAML, and a timeline for Perfetto.

Columns with the same meaning have the same names as in SCALE-Sim's COMPUTE_REPORT. The YAML has Accelergy's format."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thrifty.core.errors import UsageError
from thrifty.simulators.accelerator.simulation_result import SimulationResult, layer_rows, str_of


def write_csv(results: Sequence[SimulationResult], folder: Path) -> list[Path]:
    """Write SUMMARY.csv and, per machine, COMPUTE, STATION and ACTION reports (CSV) and operation counts (YAML)."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [write_rows(folder / "SUMMARY.csv", [result.row() for result in results])]
    for result in results:
        name = file_name(result.machine.name)
        written.append(write_rows(folder / f"{name}_COMPUTE_REPORT.csv", compute_rows(result)))
        written.append(write_rows(folder / f"{name}_STATION_REPORT.csv", layer_rows(result)))
        actions = [{"action": str_of(kind), "count": count} for kind, count in result.operations.items()]
        written.append(write_rows(folder / f"{name}_ACTION_REPORT.csv", actions))
        counts = folder / f"{name}_action_counts.yaml"
        counts.write_text(action_counts(result), encoding="utf-8")
        written.append(counts)
    return written


def compute_rows(result: SimulationResult) -> list[dict[str, Any]]:
    """Return one row per layer. Stall cycles are the cycles added by the outer memory."""
    return [
        {
            "LayerID": number,
            "Layer": layer.name,
            "Total Cycles": layer.cycles,
            "Stall Cycles": layer.waiting,
            "Overall Util %": 100 * layer.macs / (result.multipliers * layer.cycles),
            "Compute Util %": 100 * layer.macs / (result.multipliers * max(layer.cycles - layer.waiting, 1)),
            "Read Bytes": layer.read,
            "Written Bytes": layer.written,
        }
        for number, layer in enumerate(result.layers)
    ]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write a CSV file. The keys of the first row are the column titles."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)
    return path


def file_name(machine: str) -> str:
    """Return a machine's name with characters that are unsafe in file names replaced by "_"."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in machine)


_ACTIONS = {"sram": "access", "dram": "access", "register": "access"}


def action_counts(result: SimulationResult) -> str:
    """Return operation counts in Accelergy's YAML, with one component per kind and size."""
    lines = ["action_counts:", "  version: 0.4", "  local:"]
    for operation, count in result.operations.items():
        arguments = f"width: {operation.bits}"
        if operation.capacity:
            arguments += f", depth: {8 * operation.capacity // operation.bits}"
        size = f"_{operation.capacity}B" if operation.capacity else ""
        lines += [
            f"    - name: {file_name(result.machine.name)}.{operation.kind}_{operation.bits}b{size}",
            f"      attributes: {{{arguments}}}",
            "      action_counts:",
            f"        - name: {_ACTIONS.get(operation.kind, 'compute')}",
            f"          counts: {round(count)}",
        ]
    return "\n".join(lines) + "\n"


def perfetto(results: Sequence[SimulationResult]) -> dict[str, Any]:
    """Return the items of each layer's first unit in Chrome's trace event format.

    Each machine is a process, and each station is a thread. Layers follow in order. Raises UsageError if a result has
    no timelines.
    """
    events: list[dict[str, Any]] = []
    for process, result in enumerate(results):
        tick = 1e6 / result.machine.clock
        events.append(_named("process_name", process, 0, result.machine.name))
        for row, station in enumerate(result.layers[0].stations):
            events.append(_named("thread_name", process, row, station))
        before = 0
        for layer in result.layers:
            if layer.example is None:
                raise UsageError("the results have no timelines", fix="simulate(…, draw=True)")
            for row, (starts, ends) in enumerate(zip(layer.example.start[:, 0], layer.example.end[:, 0], strict=True)):
                for item, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
                    if end > start:
                        place = {"ph": "X", "pid": process, "tid": row, "cat": layer.name, "name": str(item)}
                        times = {"ts": (before + start) * tick, "dur": (end - start) * tick}
                        events.append({**place, **times})
            before += int(layer.example.makespan[0])
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def write_perfetto(results: Sequence[SimulationResult], path: Path) -> None:
    path.write_text(json.dumps(perfetto(results), separators=(",", ":")), encoding="utf-8")


def _named(kind: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": row, "args": {"name": name}}
