"""Fit device efficiencies to published throughput; write src/thrifty/simulators/cluster/device_efficiency.json.

Run it as `python -m tools.fit_device_efficiency`. The data are 109 rows of the tables in MosaicML's llm-foundry, in
published_throughput.csv. Assumptions for all rows: NVLink within a node, 1.6 Tb/s (A100) or 3.2 Tb/s (H100) between
nodes, fused losses, overlapping collectives.

Every row is tested with a fit that excludes its model size: five folds of whole sizes. For devices without rows, a
chip's rows are tested with the fit of the other chips. "errors" are simulated over measured tokens/s - 1.
"""

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from thrifty.simulators.cluster.closed_form_workload import DecoderSizes, transformer
from thrifty.simulators.cluster.cluster_mesh import ClusterMesh, StepSettings
from thrifty.simulators.cluster.device_efficiency import OTHERS, DeviceEfficiency
from thrifty.simulators.cluster.device_specs import DEVICES
from thrifty.simulators.cluster.network_topology import LINKS, Cluster
from thrifty.simulators.cluster.simulated_step import simulate
from thrifty.simulators.cluster.workload import Workload

ROWS = Path(__file__).parent / "published_throughput.csv"
TARGET = Path(__file__).parents[1] / "src/thrifty/simulators/cluster/device_efficiency.json"
SIZES = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
"""Depth, width, heads, from the smallest model to the largest."""
VOCABULARY = 50_368
HARDWARE = {
    "h100_80gb": ("h100", "nvlink4", "infiniband-ndr"),
    "a100_80gb": ("a100-80gb", "nvlink3", "infiniband-hdr"),
    "a100_40gb": ("a100-40gb", "nvlink3", "infiniband-hdr"),
}
PARAMETERS = ("products", "attention", "float8")
START, STEP, ITERATIONS = (0.6, 0.5, 0.5), 0.02, 4
FOLDS = 5


@dataclass(frozen=True)
class ThroughputRow:
    """A row of the published table."""

    model: str
    length: int
    gpus: int
    gpu: str
    micro_batch: int
    effective_batch: int
    measured: float
    """Tokens/s per device."""
    number_format: str
    recompute: bool
    zero: int
    parameters: int

    @property
    def device(self) -> str:
        return HARDWARE[self.gpu][0]

    @property
    def chip(self) -> str:
        return self.device.partition("-")[0]

    @property
    def fold(self) -> int:
        return list(SIZES).index(self.model) % FOLDS

    @cached_property
    def workload(self) -> Workload:
        return transformer(self.model, DecoderSizes(*SIZES[self.model], self.length, VOCABULARY))

    def simulated(self, rates: DeviceEfficiency) -> float:
        """Return the simulated tokens/s per device."""
        device, inside, between = HARDWARE[self.gpu]
        cluster = Cluster(DEVICES[device], 8, self.gpus // 8, LINKS[inside], LINKS[between])
        settings = StepSettings(
            self.effective_batch,
            self.micro_batch,
            recompute="every" if self.recompute else "none",
            zero=self.zero,
            number_format=self.number_format,
        )
        report = simulate(self.workload, cluster, ClusterMesh(shard=self.gpus), settings, rates)
        return report.tokens_per_second / self.gpus


def read_rows() -> list[ThroughputRow]:
    return [
        ThroughputRow(
            model=row["model"],
            length=int(row["length"]),
            gpus=int(row["gpus"]),
            gpu=row["gpu"],
            micro_batch=int(row["micro_batch"]),
            effective_batch=int(row["effective_batch"]),
            measured=float(row["tokens_per_second_per_gpu"]),
            number_format="float8" if row["precision"] == "amp_fp8" else "bfloat16",
            recompute=row["recompute"] == "True",
            zero=3 if row["sharding"] == "FULL_SHARD" else 2,
            parameters=int(row["parameters"]),
        )
        for row in csv.DictReader(ROWS.read_text().splitlines())
    ]


def fit(rows: Sequence[ThroughputRow]) -> DeviceEfficiency:
    """Fit by least squares of the log ratio of simulated to measured throughput, with Gauss-Newton.

    A parameter that no row depends on keeps its initial value.
    """
    point = np.log(START)
    for _ in range(ITERATIONS):
        residuals = _log_ratios(rows, point)
        slopes = [(_log_ratios(rows, point + STEP * axis) - residuals) / STEP for axis in np.eye(len(point))]
        point = point - np.linalg.lstsq(np.stack(slopes, axis=1), residuals)[0]
    return _efficiency(point)


def _efficiency(point: np.ndarray) -> DeviceEfficiency:
    return DeviceEfficiency(*(round(float(share), 4) for share in np.exp(point)))


def _log_ratios(rows: Sequence[ThroughputRow], point: np.ndarray) -> np.ndarray:
    rates = DeviceEfficiency(*np.exp(point).tolist())
    return np.log([row.simulated(rates) / row.measured for row in rows])


def cross_validate(rows: Sequence[ThroughputRow], group: Callable[[ThroughputRow], int | str]) -> dict[str, Any]:
    """Return the fit of all rows, and the errors of each group under the fit of the other groups."""
    groups = {}
    for key in sorted({group(row) for row in rows}, key=str):
        rates = fit([row for row in rows if group(row) != key])
        errors = [row.simulated(rates) / row.measured - 1 for row in rows if group(row) == key]
        groups[str(key)] = {"efficiency": _shares(rates), "errors": [round(error, 4) for error in errors]}
    errors = [error for tested in groups.values() for error in tested["errors"]]
    low, high = np.quantile(1 + np.array(errors), [0.05, 0.95])
    return {
        "efficiency": _shares(fit(rows)),
        "judged": len(errors),
        "within_15_percent": round(float(np.mean(np.abs(errors) <= 0.15)), 3),
        "low": round(float(low), 3),
        "high": round(float(high), 3),
        "left_out": groups,
    }


def _shares(rates: DeviceEfficiency) -> dict[str, float]:
    return {name: getattr(rates, name) for name in PARAMETERS}


def main() -> None:
    rows = read_rows()
    devices = {
        name: cross_validate([row for row in rows if row.device == name], lambda row: row.fold)
        for name, *_ in HARDWARE.values()
    }
    others = cross_validate([row for row in rows if row.number_format == "bfloat16"], lambda row: row.chip)
    others["efficiency"]["float8"] = devices["h100"]["efficiency"]["float8"]
    content = {
        "written_by": "tools/fit_device_efficiency.py",
        "source": "MosaicML llm-foundry, scripts/train/benchmarking/README.md (061f2c7)",
        "devices": {**devices, OTHERS: others},
    }
    TARGET.write_text(json.dumps(content, indent=2) + "\n")
    for name, fitted in content["devices"].items():
        print(name, {key: value for key, value in fitted.items() if key != "left_out"})


if __name__ == "__main__":
    main()
