"""Links between devices, and clusters made of them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from thrifty.core.errors import UsageError, refuse_unknown
from thrifty.simulators.cluster.device_specs import DEVICES, HARDWARE, DeviceSpec


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


LINKS: Mapping[str, NetworkLink] = {
    name: NetworkLink(name, row["latency"], 1e9 * row["gigabytes"], row["source"])
    for name, row in HARDWARE["links"].items()
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


def _cluster(device: str, per_node: int, nodes: int, inside: str, between: str, sharing: int = 1) -> Cluster:
    port = LINKS[between]
    if sharing > 1:
        shared = f"{port.source}; one port for {sharing} devices"
        port = replace(port, bandwidth=port.bandwidth / sharing, source=shared)
    return Cluster(DEVICES[device], per_node, nodes, LINKS[inside], port)


CLUSTERS: Mapping[str, Cluster] = {name: _cluster(**row) for name, row in HARDWARE["clusters"].items()}


def find_cluster(name: str) -> Cluster:
    """A named cluster; UsageError with the nearest name where there is none."""
    refuse_unknown("unknown cluster", name, CLUSTERS)
    return CLUSTERS[name]
