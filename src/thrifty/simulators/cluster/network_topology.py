"""Links between devices, and clusters of nodes."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from thrifty.core.errors import UsageError, refuse_unknown
from thrifty.simulators.cluster.device_specs import DEVICES, HARDWARE, DeviceSpec


@dataclass(frozen=True)
class NetworkLink:
    """A link between devices. A message of n bytes takes `latency` + n / `bandwidth` seconds."""

    name: str
    latency: float
    """Seconds per step of a collective, for messages of any size."""
    bandwidth: float
    """Bandwidth per device in bytes/s, in each direction. Both directions work at the same time."""
    source: str

    def seconds(self, size: float) -> float:
        """Return the seconds until a message of `size` bytes arrives."""
        return self.latency + size / self.bandwidth


LINKS: Mapping[str, NetworkLink] = {
    name: NetworkLink(name, row["latency"], 1e9 * row["gigabytes"], row["source"])
    for name, row in HARDWARE["links"].items()
}


@dataclass(frozen=True)
class RankGroup:
    """A group of communicating ranks, and its placement on nodes.

    All groups of a mesh axis communicate at the same time. Each group uses the network ports of its own ranks.
    """

    size: int
    per_node: int
    """Maximum number of ranks of the group on one node."""
    nodes: int
    """Number of nodes with ranks of the group."""
    inside: NetworkLink
    between: NetworkLink

    @property
    def even(self) -> bool:
        """True if all nodes of the group have the same number of its ranks."""
        return self.size == self.per_node * self.nodes


@dataclass(frozen=True)
class Cluster:
    """A cluster of identical nodes with identical devices. Ranks are counted node by node."""

    device: DeviceSpec
    per_node: int
    nodes: int
    inside: NetworkLink
    between: NetworkLink
    """The link between nodes. If devices share ports, the bandwidth is one device's part."""

    @property
    def ranks(self) -> int:
        return self.per_node * self.nodes

    def group(self, size: int, stride: int = 1) -> RankGroup:
        """Return the group of `size` ranks {0, stride, 2 · stride, …}. All other groups of the axis have the same
        placement on nodes.

        Raises UsageError if the cluster has fewer ranks.
        """
        if size < 1 or stride < 1:
            raise UsageError(
                f"there is no group of {size} ranks with stride {stride}", fix="use a size and a stride of at least 1"
            )
        if (size - 1) * stride >= self.ranks:
            raise UsageError(
                f"{size} ranks with stride {stride} span {(size - 1) * stride + 1} ranks, the cluster has {self.ranks}",
                fix="use more nodes; or use a smaller mesh",
            )
        occupied = Counter(rank // self.per_node for rank in range(0, size * stride, stride))
        return RankGroup(size, max(occupied.values()), len(occupied), self.inside, self.between)

    def of(self, ranks: int) -> Self:
        """Return the cluster reduced or extended to `ranks` devices: full nodes, or one smaller node.

        Raises UsageError if the ranks do not fill whole nodes.
        """
        if ranks < 1:
            raise UsageError(f"there is no cluster of {ranks} ranks", fix="use 1 or more")
        if ranks <= self.per_node:
            return replace(self, per_node=ranks, nodes=1)
        if ranks % self.per_node:
            raise UsageError(
                f"{ranks} ranks do not fill nodes of {self.per_node}",
                fix=f"use {ranks - ranks % self.per_node} or {ranks + self.per_node - ranks % self.per_node} ranks",
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
    """Return a cluster by name. Raises UsageError with the nearest name if no cluster has the name."""
    refuse_unknown("unknown cluster", name, CLUSTERS)
    return CLUSTERS[name]
