"""Specifications of devices: FLOP/s, memory and bandwidth, with sources."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from thrifty.core.errors import UsageError, refuse_unknown

GIB = 2.0**30
"""Bytes per GB of device memory, as vendors count: an "80 GB" A100 reports 81,920 MiB (recalled, not checked)."""


@dataclass(frozen=True)
class DeviceSpec:
    """A GPU or CPU with its rates."""

    name: str
    flops: Mapping[str, float]
    """Dense matmul FLOP/s by number format: "float32", "tfloat32", "bfloat16", "float16", "float8"."""
    memory: float
    """Bytes of device memory."""
    bandwidth: float
    """Memory bandwidth in bytes/s, reads and writes together."""
    sources: Mapping[str, str]
    """Sources of `flops`, `memory` and `bandwidth`."""

    @property
    def has_fast_bfloat16(self) -> bool:
        return self.flops.get("bfloat16", 0.0) > self.flops.get("float32", 0.0)

    def rate(self, number_format: str) -> float:
        """Return the FLOP/s of a number format. Raises UsageError if the device has no rate for the format."""
        refuse_unknown(f"{self.name} has no rate for", number_format, self.flops)
        return self.flops[number_format]


def measured(name: str, flops: Mapping[str, float], memory: float, bandwidth: float, source: str) -> DeviceSpec:
    """Return a device with measured rates: `flops` in FLOP/s, `memory` in bytes, `bandwidth` in bytes/s.

    Raises UsageError unless all values are above zero.
    """
    if min([memory, bandwidth, *flops.values()], default=0.0) <= 0 or not flops:
        raise UsageError(f"{name} must have rates and a memory above zero", fix="measure again on a quiet machine")
    return DeviceSpec(name, flops, memory, bandwidth, dict.fromkeys(("flops", "memory", "bandwidth"), source))


def _published(name: str, tera: Mapping[str, float], gib: float, gigabytes: float, source: str) -> DeviceSpec:
    """Return a device from values in the units of data sheets: TFLOP/s, GiB and GB/s."""
    flops = {number_format: 1e12 * value for number_format, value in tera.items()}
    return measured(name, flops, gib * GIB, 1e9 * gigabytes, source)


_TEXT = (files("thrifty.simulators.cluster") / "hardware.toml").read_text(encoding="utf-8")
HARDWARE: Mapping[str, Mapping[str, Any]] = tomllib.loads(_TEXT)
DEVICES: Mapping[str, DeviceSpec] = {name: _published(name, **row) for name, row in HARDWARE["devices"].items()}
