"""Links between devices, and clusters made of them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from thrifty.core.errors import UsageError, refuse_unknown
from thrifty.simulators.cluster.device_specs import DEVICES, DeviceSpec


@dataclass(frozen=True)
class NetworkLink:
    """A way from one device to another: a message of n bytes takes `latency` + n / `bandwidth`."""

    name: str
    latency: float
    """Seconds a step of a collective takes on it, whatever its size."""
    bandwidth: float
    """Bytes/s that arrive, in each direction and for each device, both directions at once."""
    source: str

    def seconds(self, size: float) -> float:
        """Seconds until a message of `size` bytes has arrived."""
        return self.latency + size / self.bandwidth


def _nvlink(generation: int, links: int, wire: float, arriving: float) -> NetworkLink:
    source = (
        f"{links} links of {wire:g} GB/s in each direction, of which NCCL counts {arriving:g} (src/graph/topo.h); "
        "latency of a ring step with the LL128 protocol (src/graph/tuning.cc)"
    )
    return NetworkLink(f"nvlink{generation}", 1.9e-6, links * arriving * 1e9, source)


def _network(name: str, gigabits: float, devices: int = 1, latency: float = 4.0e-6) -> NetworkLink:
    shared = f", one port for {devices} devices" if devices > 1 else ""
    source = f"{gigabits:g} Gb/s as named{shared}; latency of a ring step over a network (NCCL, src/graph/tuning.cc)"
    return NetworkLink(name, latency, gigabits / 8 / devices * 1e9, source)


_PCIE = (
    "x16 as named, three quarters of it as in NCCL's 12 GB/s for generation 3 (src/graph/topo.h); latency: tuning.cc"
)
_XGMI = "7 links of 64 GB/s in each direction (AMD Instinct MI300X data sheet); latency as NVLink's (unverified)"
_LOOPBACK = "gloo between two processes of one busy box with 2 cores, messages there and back, measured"

LINKS: Mapping[str, NetworkLink] = {
    link.name: link
    for link in (
        _nvlink(2, 6, 25.0, 20.0),
        _nvlink(3, 12, 25.0, 20.0),
        _nvlink(4, 18, 25.0, 20.6),
        _nvlink(5, 18, 50.0, 40.1),
        NetworkLink("infinity-fabric", 1.9e-6, 448e9, _XGMI),
        NetworkLink("pcie3", 2.5e-6, 12e9, _PCIE),
        NetworkLink("pcie4", 2.5e-6, 24e9, _PCIE),
        NetworkLink("pcie5", 2.5e-6, 48e9, _PCIE),
        _network("infiniband-edr", 100),
        _network("infiniband-hdr", 200),
        _network("infiniband-ndr", 400),
        _network("roce-400", 400),
        _network("ethernet-10", 10, latency=30e-6),
        _network("ethernet-100", 100, latency=15e-6),
        NetworkLink("gloo-loopback", 60e-6, 3.5e9, _LOOPBACK),
    )
}


@dataclass(frozen=True)
class RankGroup:
    """Ranks that talk to each other, and how they stand on nodes.

    The other groups of their axis do the same at the same time, each over its own ranks' share of a node's ports.
    """

    size: int
    per_node: int
    """How many of them share a node, on the fullest one."""
    nodes: int
    """How many nodes they stand on."""
    inside: NetworkLink
    between: NetworkLink

    @property
    def even(self) -> bool:
        """Whether every node has as many of them."""
        return self.size == self.per_node * self.nodes


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices. Ranks are counted node by node."""

    device: DeviceSpec
    per_node: int
    nodes: int
    inside: NetworkLink
    between: NetworkLink
    """Bandwidth for each device, where a node's devices share its ports."""

    @property
    def ranks(self) -> int:
        return self.per_node * self.nodes

    def group(self, size: int, stride: int = 1) -> RankGroup:
        """The ranks {0, stride, 2 stride, …}, `size` of them; each other group of the same axis is placed alike.

        Raises UsageError where the cluster has fewer ranks.
        """
        if size < 1 or stride < 1:
            raise UsageError(f"a group of {size} ranks with stride {stride}", fix="both are 1 or more")
        if (size - 1) * stride >= self.ranks:
            raise UsageError(
                f"{size} ranks with stride {stride} need {(size - 1) * stride + 1} ranks, the cluster has {self.ranks}",
                fix="use more nodes, or a smaller mesh",
            )
        occupied = Counter(rank // self.per_node for rank in range(0, size * stride, stride))
        return RankGroup(size, max(occupied.values()), len(occupied), self.inside, self.between)

    def of(self, ranks: int) -> Self:
        """The same with as many whole nodes as `ranks` need; less than a node's worth is one smaller node."""
        if ranks < 1:
            raise UsageError(f"a cluster of {ranks} ranks", fix="ask for 1 or more")
        if ranks <= self.per_node:
            return replace(self, per_node=ranks, nodes=1)
        if ranks % self.per_node:
            raise UsageError(
                f"{ranks} ranks do not fill nodes of {self.per_node}",
                fix=f"ask for {ranks - ranks % self.per_node} or {ranks + self.per_node - ranks % self.per_node}",
            )
        return replace(self, nodes=ranks // self.per_node)


CLUSTERS: Mapping[str, Cluster] = {
    "dgx-1-v100": Cluster(DEVICES["v100-16gb"], 8, 1, LINKS["nvlink2"], _network("infiniband-edr", 100, devices=2)),
    "dgx2h-v100": Cluster(DEVICES["v100-dgx2h"], 16, 32, LINKS["nvlink2"], _network("infiniband-edr", 100, devices=2)),
    "selene-a100": Cluster(DEVICES["a100-80gb"], 8, 384, LINKS["nvlink3"], LINKS["infiniband-hdr"]),
    "h100-roce": Cluster(DEVICES["h100"], 8, 2048, LINKS["nvlink4"], LINKS["roce-400"]),
    "h100-box": Cluster(DEVICES["h100"], 8, 1, LINKS["nvlink4"], LINKS["infiniband-ndr"]),
    "cpu-gloo": Cluster(DEVICES["cpu"], 4, 1, LINKS["gloo-loopback"], LINKS["ethernet-10"]),
}
"""dgx-1-v100: 8 V100 and 4 ports of 100 Gb/s a node. dgx2h-v100: the 512 V100 of Megatron-LM (Shoeybi et al. 2019), 16
and 8 ports a node. selene-a100: the 3,072 A100 of Narayanan et al. 2021, 8 and 8 HDR ports a node. h100-roce: the 16K
H100 of Llama 3 (2024), 8 and 8 ports of 400 Gb/s a node, without the 1:7
oversubscription between pods of 3,072 (from memory)."""


def find_cluster(name: str) -> Cluster:
    """A named cluster; UsageError with the nearest name where there is none."""
    refuse_unknown("unknown cluster", name, CLUSTERS)
    return CLUSTERS[name]
