"""Devices: what each can compute, hold and move, every number with its source."""

from collections.abc import Mapping
from dataclasses import dataclass

from thrifty.core.errors import UsageError, refuse_unknown

GIB = 2.0**30
"""Vendors call this a GB of device memory: an "80 GB" A100 reports 81,920 MiB (from memory)."""


@dataclass(frozen=True)
class DeviceSpec:
    """One accelerator or processor."""

    name: str
    flops: Mapping[str, float]
    """Dense FLOP/s of matrix products by number format: "float32", "tfloat32", "bfloat16", "float16", "float8"."""
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes/s between the device and its memory, reads and writes together."""
    sources: Mapping[str, str]
    """Where `flops`, `memory` and `bandwidth` are from."""

    @property
    def has_fast_bfloat16(self) -> bool:
        return self.flops.get("bfloat16", 0.0) > self.flops.get("float32", 0.0)

    def rate(self, number_format: str) -> float:
        """FLOP/s in a number format; UsageError where the device has no units for it."""
        refuse_unknown(f"{self.name} has no rate for", number_format, self.flops)
        return self.flops[number_format]


def measured(name: str, flops: Mapping[str, float], memory: float, bandwidth: float, source: str) -> DeviceSpec:
    """A device from numbers that were measured, by a probe of this machine for one: FLOP/s, bytes, bytes/s."""
    if min([memory, bandwidth, *flops.values()], default=0.0) <= 0 or not flops:
        raise UsageError(f"{name} must have rates and a memory above zero", fix="measure again on a quiet machine")
    return DeviceSpec(name, flops, memory, bandwidth, dict.fromkeys(("flops", "memory", "bandwidth"), source))


def _published(name: str, tera: Mapping[str, float], gib: float, gigabytes: float, source: str) -> DeviceSpec:
    """A row of the table, from the units of datasheets: TFLOP/s, GiB, GB/s."""
    flops = {number_format: 1e12 * value for number_format, value in tera.items()}
    return measured(name, flops, gib * GIB, 1e9 * gigabytes, source)


_VOLTA = {"float32": 15.7, "float16": 125.0}
_AMPERE = {"float32": 19.5, "tfloat32": 156.0, "bfloat16": 312.0, "float16": 312.0}
_HOPPER = {"float32": 66.9, "tfloat32": 494.7, "bfloat16": 989.4, "float16": 989.4, "float8": 1978.9}
_BLACKWELL = {"float32": 75.0, "tfloat32": 1125.0, "bfloat16": 2250.0, "float16": 2250.0, "float8": 4500.0}
_CDNA3 = {"float32": 163.4, "tfloat32": 653.7, "bfloat16": 1307.4, "float16": 1307.4, "float8": 2614.9}
_V100 = "NVIDIA Tesla V100 datasheet: 125 TFLOP/s of tensor cores, 900 GB/s (from memory, unverified)"
_DGX_2H = "NVIDIA DGX-2H datasheet: 2.1 PFLOP/s by 16 (from memory); Megatron-LM 2019 calls 39 TFLOP/s 30 % of its peak"
_A100 = "NVIDIA A100 datasheet: 312 TFLOP/s, 40 GB at 1,555 GB/s, 80 GB (SXM) at 2,039 GB/s"
_H100 = "NVIDIA H100 datasheet (SXM5), halved where it is given with 2:4 sparsity; 3.35 TB/s"
_H200 = "NVIDIA H200 datasheet: the H100's rates, 141 GB at 4.8 TB/s (from memory)"
_B200 = "NVIDIA DGX B200 datasheet by 8, halved where given with 2:4 sparsity: 4.5 PFLOP/s in 8 bits (from memory)"
_MI300X = "AMD Instinct MI300X data sheet: 1,307.4 TFLOP/s dense in 16 bits, 192 GB at 5.3 TB/s (rates from memory)"
_CPU = "the best of some timings on a busy box with 2 cores, rounded; `measured` makes one of another machine's"

DEVICES: Mapping[str, DeviceSpec] = {
    device.name: device
    for device in (
        _published("v100-16gb", _VOLTA, 16, 900, _V100),
        _published("v100-32gb", _VOLTA, 32, 900, _V100),
        _published("v100-dgx2h", {"float32": 16.4, "float16": 131.0}, 32, 900, _DGX_2H),
        _published("a100-40gb", _AMPERE, 40, 1555, _A100),
        _published("a100-80gb", _AMPERE, 80, 2039, _A100),
        _published("h100", _HOPPER, 80, 3350, _H100),
        _published("h200", _HOPPER, 141, 4800, _H200),
        _published("b200", _BLACKWELL, 180, 8000, _B200),
        _published("mi300x", _CDNA3, 192, 5300, _MI300X),
        measured("cpu", {"float32": 60e9, "bfloat16": 180e9}, 16 * GIB, 15e9, _CPU),
    )
}
