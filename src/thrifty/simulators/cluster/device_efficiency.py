"""How fast a device gets through work, given what it could reach at best."""

from dataclasses import dataclass

from thrifty.simulators.cluster.device_specs import DeviceSpec
from thrifty.simulators.cluster.workload import PassWork


@dataclass(frozen=True)
class DeviceEfficiency:
    """What a training step gets of the rates that are published. One set for every device, model and cluster."""

    products: float = 0.73
    """Of the dense peak, in matrix products of a Transformer's sizes: tiles that do not fill all units, and clocks that
    fall under load. Fitted by hand to Narayanan et al. 2021, table 1, and to nothing else."""
    memory: float = 0.80
    """Of the memory's bandwidth, in a kernel that streams through large tensors (usual, unverified)."""
    links: float = 0.85
    """Of a network's bandwidth, for headers and for flows that meet (usual, unverified). NVLink's figures are net of
    that already."""
    kernel: float = 5e-6
    """Seconds in which the processor starts one kernel (usual, unverified); it runs ahead, so that this shows only with
    small work."""


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

    An additive roofline: products at their rate, and all bytes at theirs. Within a product a device reads ahead, so
    that it takes less than the sum: little where products are large, and where they are small they wait on memory.
    """
    flops = work.flops.per_rank(tensor, sequence_parallel) * examples
    moved = (work.moved if fused else work.unfused).per_rank(tensor, sequence_parallel) * examples + weights
    computing = flops / (device.rate(number_format) * rates.products) + moved / (device.bandwidth * rates.memory)
    return max(computing, work.kernels * rates.kernel)
