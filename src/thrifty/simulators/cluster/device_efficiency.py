"""Seconds of work on a device, from its published rates (FLOP/s, bytes/s) and the fraction of each rate that training
reaches.

`device_efficiency.json` has one fit per device with published training throughput, and one fit over all these devices
for devices without published training throughput. `tools/fit_device_efficiency.py` writes the file. Intervals are from
runs that the fit did not use.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from thrifty.simulators.cluster.device_specs import DeviceSpec
from thrifty.simulators.cluster.workload import PassWork

SIXTEEN_BITS = {"float8": "bfloat16"}
"""Format of attention and of the vocabulary projection, if the matrix products of blocks are in an 8-bit format."""
OTHERS = "others"
"""Name of the fit for devices without published training throughput."""


@dataclass(frozen=True)
class DeviceEfficiency:
    """Reached fractions of published rates (1 = the published rate)."""

    products: float
    """Fraction of the dense peak FLOP/s that matrix products with weights reach."""
    attention: float
    """Fraction of the dense peak FLOP/s that fused attention kernels reach; FLOPs are counted without a causal mask."""
    float8: float
    """Fraction of the dense 8-bit peak FLOP/s that matrix products with weights reach."""
    low: float = 1.0
    """Measured / simulated seconds: 5th percentile over runs that the fit did not use."""
    high: float = 1.0
    """Measured / simulated seconds: 95th percentile over the same runs."""
    basis: str = "given"
    """Description of the runs from which `low` and `high` are computed."""
    memory: float = 0.80
    """Fraction of memory bandwidth that elementwise kernels on large tensors reach (a typical value, unverified)."""
    links: float = 0.85
    """Fraction of network bandwidth that headers and congestion leave (a typical value, unverified). Bandwidths of
    NVLink already exclude both losses.
    """
    kernel: float = 5e-6
    """Seconds to launch a kernel (a typical value, unverified). Launches limit only small kernels."""


@cache
def fitted_devices() -> Mapping[str, Mapping[str, Any]]:
    """Return the fitted `DeviceEfficiency` values and the statistics of their evaluation, by device."""
    text = (files("thrifty.simulators.cluster") / "device_efficiency.json").read_text(encoding="utf-8")
    return json.loads(text)["devices"]


def find_efficiency(device: str) -> DeviceEfficiency:
    """Return the fitted efficiency of a device. For a device without published runs, return the fit over all devices,
    with the interval from held-out devices.
    """
    fits = fitted_devices()
    fit = fits.get(device, fits[OTHERS])
    basis = (
        f"{fit['judged']} published runs on {device}, each simulated by a fit without its model size"
        if device in fits
        else f"{fit['judged']} published runs on other devices, each simulated by a fit without its chip; "
        f"no published run on {device}"
    )
    return DeviceEfficiency(**fit["efficiency"], low=fit["low"], high=fit["high"], basis=basis)


def seconds(
    work: PassWork,
    examples: float,
    device: DeviceSpec,
    rates: DeviceEfficiency,
    *,
    number_format: str,
    tensor: int = 1,
    sequence_parallel: bool = False,
    weights: float = 0.0,
    fused: bool = True,
) -> float:
    """Return the seconds of one pass over `examples` examples, on one rank of a tensor group.

    `weights` is the number of bytes of weights and weight gradients that the pass reads and writes. The model is an
    additive roofline: the times of matrix products, attention and memory traffic are summed. A device overlaps some
    memory traffic with products and takes less than the sum. The difference is small, because either products or memory
    traffic dominates.
    """
    attention = work.attention.per_rank(tensor, sequence_parallel) * examples
    products = work.flops.per_rank(tensor, sequence_parallel) * examples - attention
    moved = (work.moved if fused else work.unfused).per_rank(tensor, sequence_parallel) * examples + weights
    reached = rates.float8 if number_format == "float8" else rates.products
    computing = products / (device.rate(number_format) * reached) + moved / (device.bandwidth * rates.memory)
    if attention:
        attention_rate = device.rate(SIXTEEN_BITS.get(number_format, number_format))
        computing += attention / (attention_rate * rates.attention)
    return max(computing, work.kernels * rates.kernel)
