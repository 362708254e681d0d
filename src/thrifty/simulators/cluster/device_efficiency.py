"""Seconds of work on a device, from the fractions of its published rates that training steps reach.

`device_efficiency.json` has a fit for each device with published throughput, and one of all devices for other devices.
`tools/fit_device_efficiency.py` writes it. Each interval is from rows that the fit did not use."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from thrifty.simulators.cluster.device_specs import DeviceSpec
from thrifty.simulators.cluster.workload import PassWork

SIXTEEN_BITS = {"float8": "bfloat16"}
"""Formats of attention and of the head, by the 8-bit format of the blocks' products."""
OTHERS = "others"
"""Name of the fit for devices without published throughput."""


@dataclass(frozen=True)
class DeviceEfficiency:
    """Reached fractions of published rates."""

    products: float
    """Fraction of the dense peak in matrix products with weights."""
    attention: float
    """Fraction of the dense peak in fused attention kernels, counted without a causal mask."""
    float8: float
    """Fraction of the dense 8-bit peak in matrix products with weights."""
    low: float = 1.0
    """Measured over simulated seconds: the 5th percentile of runs that the fit did not use."""
    high: float = 1.0
    """Measured over simulated seconds: the 95th percentile of the same runs."""
    basis: str = "given"
    """The runs from which `low` and `high` are computed."""
    memory: float = 0.80
    """Fraction of memory bandwidth in kernels that stream large tensors (a usual value, unverified)."""
    links: float = 0.85
    """Fraction of network bandwidth after headers and congestion (a usual value, unverified). NVLink's figures already
    exclude both."""
    kernel: float = 5e-6
    """Seconds to launch a kernel (a usual value, unverified). The CPU runs ahead, so it limits only small kernels."""


@cache
def fitted_devices() -> Mapping[str, Mapping[str, Any]]:
    """Return the fits and their evaluation, by device."""
    text = (files("thrifty.simulators.cluster") / "device_efficiency.json").read_text(encoding="utf-8")
    return json.loads(text)["devices"]


def find_efficiency(device: str) -> DeviceEfficiency:
    """Return the fit of a device, or the fit of all devices with the interval of left-out devices."""
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

    `weights` are the bytes of weights and their gradients that the pass reads and writes. The model is an additive
    roofline: products, attention and bytes take time at their own rates. A device reads ahead within a product, so it
    takes less than the sum. The difference is small: large products dominate, and small ones wait for memory.
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
