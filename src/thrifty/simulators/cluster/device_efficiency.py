"""Seconds of work on a device: the share of its published rates that a training step reaches.

`device_efficiency.json` has a fit for each device with published throughput, and one of all of them for other devices.
`tools/fit_device_efficiency.py` writes it. Each interval is from rows that their fit had not seen.
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
"""The format of attention and of the head where the products of blocks are in 8 bits."""
OTHERS = "others"
"""The fit for devices without published throughput."""


@dataclass(frozen=True)
class DeviceEfficiency:
    """Shares of published rates."""

    products: float
    """Share of the dense peak in matrix products with weights."""
    attention: float
    """Share of the dense peak in fused attention kernels, counted without a causal mask."""
    float8: float
    """Share of the dense 8-bit peak in matrix products with weights."""
    low: float = 1.0
    """Measured over simulated seconds: the 5th percentile of runs that the fit had not seen."""
    high: float = 1.0
    """The 95th percentile."""
    basis: str = "given"
    """The runs behind `low` and `high`."""
    memory: float = 0.80
    """Of the memory's bandwidth, in a kernel that streams through large tensors (usual, unverified)."""
    links: float = 0.85
    """Of a network's bandwidth, for headers and for flows that meet (usual, unverified). NVLink's figures are net of
    that already."""
    kernel: float = 5e-6
    """Seconds in which the processor starts one kernel (usual, unverified); it runs ahead, so that this shows only with
    small work."""


@cache
def fitted_devices() -> Mapping[str, Mapping[str, Any]]:
    """The fits and how they were judged, by device."""
    text = (files("thrifty.simulators.cluster") / "device_efficiency.json").read_text(encoding="utf-8")
    return json.loads(text)["devices"]


def find_efficiency(device: str) -> DeviceEfficiency:
    """The fit for a device by its name, or the fit of all devices with the interval of devices left out."""
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
    """Of one pass over so many examples, on one rank of a tensor group; `weights` are bytes of weights and their
    gradients read and written in it.

    An additive roofline: products and attention each at their rate, and all bytes at theirs. Within a product a device
    reads ahead, so that it takes less than the sum: little where products are large, and where they are small they wait
    on memory.
    """
    attention = work.attention.per_rank(tensor, sequence_parallel) * examples
    products = work.flops.per_rank(tensor, sequence_parallel) * examples - attention
    moved = (work.moved if fused else work.unfused).per_rank(tensor, sequence_parallel) * examples + weights
    share = rates.float8 if number_format == "float8" else rates.products
    computing = products / (device.rate(number_format) * share) + moved / (device.bandwidth * rates.memory)
    if attention:
        attending = device.rate(SIXTEEN_BITS.get(number_format, number_format))
        computing += attention / (attending * rates.attention)
    return max(computing, work.kernels * rates.kernel)
