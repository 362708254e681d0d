"""Times of collectives: each step of an algorithm costs a latency, and each byte on a link costs bandwidth.

The first functions are algorithms between n ranks over equal links of latency a (seconds) and bandwidth b (bytes/s each
way). The later ones place them on nodes. Additions are not counted, because memory is faster than links. Sizes, in
bytes:

    all_reduce       the tensor that each rank has, before and after
    all_gather       the whole tensor that each rank has afterwards
    reduce_scatter   the whole tensor that each rank has before
    broadcast, send  the tensor
    all_to_all       everything on a rank, before as after, its own part included

Sources: Thakur, Rabenseifner, Gropp 2005 (Optimization of Collective Communication Operations in MPICH); Sanders,
Speck, Träff 2009 for the pair of trees that NCCL uses. Träff 2024 (from memory) shows that a reduce-scatter among any
number of ranks requires only log2 n steps, rounded up."""

import math
from collections.abc import Callable, Mapping

from thrifty.core.errors import refuse_unknown
from thrifty.simulators.cluster.network_topology import NetworkLink, RankGroup

Algorithm = Callable[[int, float, float, float], float]
"""Seconds for n ranks, a size in bytes, a latency and a bandwidth."""


def rounds(n: int) -> int:
    """Return log2 n, rounded up: the halvings of a group of n ranks."""
    return (n - 1).bit_length()


def direct(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of one message between two ranks."""
    return a + size / b


def ring(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of an all-gather or reduce-scatter around a ring: n - 1 steps, an n-th of the tensor each."""
    return (n - 1) * a + (n - 1) / n * size / b


def halving(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of an all-gather by doubling or reduce-scatter by halving: a ring's bytes in log2 n steps."""
    return rounds(n) * a + (n - 1) / n * size / b


def ring_all_reduce(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of a reduce-scatter, then all-gather, around a ring."""
    return 2 * ring(n, size, a, b)


def halving_doubling_all_reduce(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of Rabenseifner's algorithm: reduce-scatter by halving, then all-gather by doubling."""
    return 2 * halving(n, size, a, b)


def recursive_doubling_all_reduce(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of log2 n exchanges of whole tensors, fast for small tensors.

    Ranks beyond a power of two first send their tensor to another rank, and receive the result at the end.
    """
    steps = n.bit_length() - 1 + (0 if n.bit_count() == 1 else 2)
    return steps * (a + size / b)


def pipelined(steps: int, size: float, a: float, b: float) -> float:
    """Return the seconds to send a tensor along a chain of `steps` links, in the best number of pieces."""
    if not a:
        return size / b
    pieces = max(1.0, math.sqrt((steps - 1) * size / (a * b)))
    return (steps + pieces - 1) * (a + size / pieces / b)


def double_tree_all_reduce(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of a reduce and broadcast on two trees at once, half of the tensor on each.

    A leaf of one tree is an inner node of the other, so each rank sends twice the tensor.
    """
    return pipelined(2 * rounds(n), 2 * size, a, b)


def binomial_broadcast(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of a broadcast in which every rank with the tensor sends it to one without."""
    return rounds(n) * (a + size / b)


def scatter_gather_broadcast(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of van de Geijn's algorithm: a scatter down a tree, then an all-gather."""
    return 2 * halving(n, size, a, b)


def chain_broadcast(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of a broadcast along a chain, in pieces."""
    return pipelined(n - 1, size, a, b)


def pairwise_all_to_all(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of an exchange with one partner after another."""
    return (n - 1) * (a + size / n / b)


def bruck_all_to_all(n: int, size: float, a: float, b: float) -> float:
    """Return the seconds of log2 n steps with half of the tensor each, fast for small tensors."""
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
    """Return the seconds of a collective by its fastest algorithm; 0 for a group of one rank."""
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
    """Return the mean latency of a step and the bandwidth of rings through all ranks.

    As in NCCL, there is a ring for each rank of a node, so that all network ports carry traffic.
    """
    crossing = (group.nodes - 1) / (group.size - 1)
    latency = crossing * group.between.latency + (1 - crossing) * group.inside.latency
    return latency, min(group.inside.bandwidth, group.per_node * group.between.bandwidth)


def _with_each(size: float, group: RankGroup) -> float:
    """Return the seconds of an all-to-all with one partner after another, inside the node and between nodes."""
    neighbours, share = group.per_node - 1, size / group.size
    remote = group.size - group.per_node
    return neighbours * group.inside.seconds(share) + remote * group.between.seconds(share)


def _in_two_levels(kind: str, size: float, group: RankGroup) -> float:
    """Return the seconds of a hierarchical collective.

    It runs inside nodes, where each rank receives its part, then between ranks of equal position, then inside nodes.
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
