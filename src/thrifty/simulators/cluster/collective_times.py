"""Times of collectives in the alpha-beta model: a latency per step, and size / bandwidth.

The first functions are algorithms for n ranks over equal links of latency a (seconds) and bandwidth b (bytes/s in each
direction). The later functions place algorithms on nodes. Additions take no time, because memory is faster than links.
`size` is in bytes:

    all_reduce       the tensor on each rank, before and after
    all_gather       the whole tensor on each rank, after
    reduce_scatter   the whole tensor on each rank, before
    broadcast, send  the tensor
    all_to_all       all data on a rank, before and after, including the part for the rank itself

Sources: Thakur, Rabenseifner, Gropp 2005 (Optimization of Collective Communication Operations in MPICH). Sanders,
Speck, Träff 2009 for the pair of trees in NCCL. Träff 2024 (recalled, not checked against the paper) shows that a
reduce-scatter of n ranks needs only ⌈log2 n⌉ steps."""

import math
from collections.abc import Callable, Mapping

from thrifty.core.errors import refuse_unknown
from thrifty.simulators.cluster.network_topology import NetworkLink, RankGroup

Algorithm = Callable[[int, float, float, float], float]
"""Function from n ranks, size, latency a and bandwidth b to seconds."""


def rounds(n: int) -> int:
    """Return ⌈log2 n⌉, the number of halvings of a group of n ranks."""
    return (n - 1).bit_length()


def direct(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of one message between two ranks."""
    return a + size / b


def ring(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of a ring all-gather or reduce-scatter: n - 1 steps with 1/n of the tensor per step."""
    return (n - 1) * a + (n - 1) / n * size / b


def halving(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of an all-gather by doubling or a reduce-scatter by halving: ⌈log2 n⌉ steps."""
    return rounds(n) * a + (n - 1) / n * size / b


def ring_all_reduce(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of a ring all-reduce: a reduce-scatter, then an all-gather."""
    return 2 * ring(n, size, a, b)


def halving_doubling_all_reduce(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of Rabenseifner's algorithm: reduce-scatter by halving, then all-gather by doubling."""
    return 2 * halving(n, size, a, b)


def recursive_doubling_all_reduce(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of log2 n exchanges of the whole tensor, an algorithm for small tensors.

    If n is not a power of two, extra ranks first send their tensor to another rank and receive the result at the end.
    """
    steps = n.bit_length() - 1 + (0 if n.bit_count() == 1 else 2)
    return steps * (a + size / b)


def pipelined(steps: int, size: float, a: float, b: float) -> float:
    """Return the seconds to send a tensor along a chain of `steps` links, in the optimal number of chunks."""
    if not a:
        return size / b
    pieces = max(1.0, math.sqrt((steps - 1) * size / (a * b)))
    return (steps + pieces - 1) * (a + size / pieces / b)


def double_tree_all_reduce(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of a reduce and a broadcast on two trees in parallel. Each tree has half of the tensor.

    A leaf of one tree is an inner node of the other tree, so each rank sends twice the tensor.
    """
    return pipelined(2 * rounds(n), 2 * size, a, b)


def binomial_broadcast(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of a binomial tree: in each step, each rank that has the tensor sends the tensor to one more
    rank.
    """
    return rounds(n) * (a + size / b)


def scatter_gather_broadcast(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of van de Geijn's algorithm: a scatter down a tree, then an all-gather."""
    return 2 * halving(n, size, a, b)


def chain_broadcast(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of a broadcast along a chain, in chunks."""
    return pipelined(n - 1, size, a, b)


def pairwise_all_to_all(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of an all-to-all with one partner per step."""
    return (n - 1) * (a + size / n / b)


def bruck_all_to_all(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of ⌈log2 n⌉ steps with half of the tensor, an algorithm for small tensors."""
    return rounds(n) * (a + size / 2 / b)


ALGORITHMS: Mapping[str, Mapping[str, Algorithm]] = {
    "all_reduce": {
        "ring": ring_all_reduce,
        "halving_doubling": halving_doubling_all_reduce,
        "recursive_doubling": recursive_doubling_all_reduce,
        "double_tree": double_tree_all_reduce,
    },
    "all_gather": {"ring": ring, "doubling": halving},
    "reduce_scatter": {"ring": ring, "halving": halving},
    "broadcast": {"binomial": binomial_broadcast, "scatter_gather": scatter_gather_broadcast, "chain": chain_broadcast},
    "all_to_all": {"pairwise": pairwise_all_to_all, "bruck": bruck_all_to_all},
    "send": {"direct": direct},
}


def seconds(kind: str, size: float, group: RankGroup) -> float:
    """Return the seconds of a collective with its fastest algorithm; 0 for a group of one rank."""
    return fastest(kind, size, group)[1]


def fastest(kind: str, size: float, group: RankGroup) -> tuple[str, float]:
    """Return the fastest algorithm and its seconds. Raises UsageError for an unknown kind."""
    refuse_unknown("unknown collective", kind, ALGORITHMS)
    times = algorithms(kind, size, group)
    name = min(times, key=times.__getitem__)
    return name, times[name]


def algorithms(kind: str, size: float, group: RankGroup) -> dict[str, float]:
    """Return the seconds of each algorithm that the group can use."""
    if group.size == 1:
        return {"none": 0.0}
    if kind == "send" or group.nodes == 1 or group.per_node == 1:
        link = group.inside if group.nodes == 1 else group.between
        return _over(kind, group.size, size, link)
    if kind == "all_to_all":
        times = {"pairwise": _with_each(size, group)}
    else:
        times = {"ring": _RINGS[kind](group.size, size, *_around(group))}
    if group.even:
        times["hierarchical"] = _in_two_levels(kind, size, group)
    return times


def _over(kind: str, n: int, size: float, link: NetworkLink) -> dict[str, float]:
    return {name: time(n, size, link.latency, link.bandwidth) for name, time in ALGORITHMS[kind].items()}


_RINGS: Mapping[str, Algorithm] = {
    "all_reduce": ring_all_reduce,
    "all_gather": ring,
    "reduce_scatter": ring,
    "broadcast": chain_broadcast,
}


def _around(group: RankGroup) -> tuple[float, float]:
    """Return the mean latency of a step and the total bandwidth of rings through all ranks.

    As in NCCL, the number of rings equals the ranks per node, so that all network ports are used.
    """
    crossing = (group.nodes - 1) / (group.size - 1)
    latency = crossing * group.between.latency + (1 - crossing) * group.inside.latency
    return latency, min(group.inside.bandwidth, group.per_node * group.between.bandwidth)


def _with_each(size: float, group: RankGroup) -> float:
    """Return the seconds of an all-to-all with one partner per step, inside the node, then between nodes."""
    neighbours, share = group.per_node - 1, size / group.size
    remote = group.size - group.per_node
    return neighbours * group.inside.seconds(share) + remote * group.between.seconds(share)


def _in_two_levels(kind: str, size: float, group: RankGroup) -> float:
    """Return the seconds of a hierarchical collective.

    An all-reduce has three steps: reduce-scatter inside nodes, all-reduce between ranks with the same position in their
    nodes, all-gather inside nodes. Other collectives have one step inside nodes and one step between nodes.
    """

    def inside(kind: str) -> float:
        return min(_over(kind, group.per_node, size, group.inside).values())

    def between(kind: str, size: float) -> float:
        return min(_over(kind, group.nodes, size, group.between).values())

    share = size / group.per_node
    if kind == "all_to_all":
        return inside(kind) + between(kind, size)
    if kind in ("all_gather", "reduce_scatter"):
        return inside(kind) + between(kind, share)
    return inside("reduce_scatter") + between(kind, share) + inside("all_gather")
