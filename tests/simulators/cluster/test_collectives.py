"""Collectives: closed forms, algorithms executed on chunks of tensors, and limits."""

import math
from collections import Counter, defaultdict

import pytest
from hypothesis import assume, given
from hypothesis import strategies as some

from thrifty.core.errors import UsageError
from thrifty.simulators.cluster import collective_times
from thrifty.simulators.cluster.collective_times import ALGORITHMS, algorithms, fastest, pipelined, seconds
from thrifty.simulators.cluster.device_specs import DEVICES
from thrifty.simulators.cluster.network_topology import CLUSTERS, Cluster, NetworkLink, RankGroup

FAST, SLOW = NetworkLink("fast", 2e-6, 200e9, "a test"), NetworkLink("slow", 5e-6, 25e9, "a test")
BOX = RankGroup(8, 8, 1, FAST, SLOW)
FOUR_BOXES = RankGroup(32, 8, 4, FAST, SLOW)
APART = RankGroup(16, 1, 16, FAST, SLOW)
GB = 1e9

Rounds = list[list[tuple[int, int, set]]]
"""Messages of each round: (source, target, chunks)."""


def played(owned: dict[int, set], rounds: Rounds) -> tuple[int, int]:
    """Execute the rounds. Return the number of rounds, and the sum over rounds of the chunks on the busiest link.

    In a round, each rank sends only chunks that it has, to at most one rank, and receives from at most one rank.
    """
    carried = 0
    for messages in rounds:
        assert max(Counter(source for source, _, _ in messages).values()) == 1
        assert max(Counter(target for _, target, _ in messages).values()) == 1
        arriving = defaultdict(set)
        for source, target, pieces in messages:
            assert pieces <= owned[source]
            arriving[target] |= pieces
        for target, pieces in arriving.items():
            owned[target] |= pieces
        carried += max(len(pieces) for _, _, pieces in messages)
    return len(rounds), carried


def ring_rounds(n: int) -> Rounds:
    return [[(rank, (rank + 1) % n, {(rank - turn) % n}) for rank in range(n)] for turn in range(n - 1)]


def doubling_rounds(n: int) -> Rounds:
    """Return the messages of Bruck's all-gather for any n, from ranks at distances 1, 2, 4, …"""
    rounds, known = [], 1
    while known < n:
        take = min(known, n - known)
        pieces = [{(rank + offset) % n for offset in range(take)} for rank in range(n)]
        rounds.append([(rank, (rank - known) % n, pieces[rank]) for rank in range(n)])
        known += take
    return rounds


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 16, 21])
@pytest.mark.parametrize(("name", "rounds"), [("ring", ring_rounds), ("doubling", doubling_rounds)])
def test_all_gather_costs_equal_its_messages(n: int, name: str, rounds) -> None:
    owned = {rank: {rank} for rank in range(n)}
    turns, pieces = played(owned, rounds(n))
    assert all(owned[rank] == set(range(n)) for rank in owned)
    assert ALGORITHMS["all_gather"][name](n, GB, 3e-6, 50e9) == pytest.approx(turns * 3e-6 + pieces * GB / n / 50e9)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 21])
def test_recursive_doubling_costs_equal_its_messages(n: int) -> None:
    power = 1 << (n.bit_length() - 1)
    doubling = [1 << turn for turn in range(power.bit_length() - 1)]
    sums = {rank: {rank} for rank in range(n)}
    steps = [[(rank, rank - power) for rank in range(power, n)]]
    steps += [[(rank, rank ^ distance) for rank in range(power)] for distance in doubling]
    steps += [[(rank - power, rank) for rank in range(power, n)]]
    turns = 0
    for step in filter(None, steps):
        arriving = {target: set(sums[source]) for source, target in step}
        for target, terms in arriving.items():
            assert terms.isdisjoint(sums[target]) or terms == set(range(n)), "nothing is added twice"
            sums[target] |= terms
        turns += 1
    assert all(terms == set(range(n)) for terms in sums.values())
    expected = turns * (3e-6 + GB / 50e9)
    assert collective_times.recursive_doubling_all_reduce(n, GB, 3e-6, 50e9) == pytest.approx(expected)


@pytest.mark.parametrize("n", [2, 3, 4, 8, 21])
def test_broadcast_costs_equal_its_messages(n: int) -> None:
    owned = {rank: {0} if rank == 0 else set() for rank in range(n)}
    rounds = [
        [(rank, rank + step, {0}) for rank in range(step) if rank + step < n]
        for step in (2**turn for turn in range((n - 1).bit_length()))
    ]
    turns, tensors = played(owned, rounds)
    assert all(owned.values())
    assert collective_times.binomial_broadcast(n, GB, 3e-6, 50e9) == pytest.approx(turns * 3e-6 + tensors * GB / 50e9)


@pytest.mark.parametrize("n", [2, 3, 8, 21])
def test_all_to_all_costs_equal_its_messages(n: int) -> None:
    owned = {rank: {(rank, target) for target in range(n)} for rank in range(n)}
    rounds = [[(rank, (rank + d) % n, {(rank, (rank + d) % n)}) for rank in range(n)] for d in range(1, n)]
    turns, pieces = played(owned, rounds)
    assert all((source, rank) in owned[rank] for rank in owned for source in range(n))
    expected = turns * 3e-6 + pieces * GB / n / 50e9
    assert collective_times.pairwise_all_to_all(n, GB, 3e-6, 50e9) == pytest.approx(expected)


def test_costs_on_one_node_by_hand_calculation() -> None:
    times = {kind: algorithms(kind, GB, BOX) for kind in ALGORITHMS}
    assert times["all_reduce"]["ring"] == pytest.approx(2 * 7 * 2e-6 + 2 * 7 / 8 * GB / 200e9)
    assert times["all_reduce"]["halving_doubling"] == pytest.approx(2 * 3 * 2e-6 + 2 * 7 / 8 * GB / 200e9)
    assert times["all_reduce"]["recursive_doubling"] == pytest.approx(3 * 2e-6 + 3 * GB / 200e9)
    assert times["reduce_scatter"]["ring"] == times["all_gather"]["ring"] == times["all_reduce"]["ring"] / 2
    assert times["broadcast"]["scatter_gather"] == pytest.approx(6 * 2e-6 + 2 * 7 / 8 * GB / 200e9)
    assert times["all_to_all"]["bruck"] == pytest.approx(3 * 2e-6 + 3 / 2 * GB / 200e9)
    assert times["send"]["direct"] == pytest.approx(2e-6 + GB / 200e9)


def test_costs_between_nodes_by_hand_calculation() -> None:
    inside, between = 7 / 8 * GB / 200e9 + 3 * 2e-6, 3 / 4 * GB / 8 / 25e9 + 2 * 5e-6
    for kind in ("all_gather", "reduce_scatter"):
        assert algorithms(kind, GB, FOUR_BOXES)["hierarchical"] == pytest.approx(inside + between)
    assert algorithms("all_reduce", GB, FOUR_BOXES)["hierarchical"] == pytest.approx(2 * (inside + between))
    latency = 3 * 5e-6 + 28 * 2e-6
    assert algorithms("all_gather", GB, FOUR_BOXES)["ring"] == pytest.approx(latency + 31 / 32 * GB / 200e9)
    alone = algorithms("all_to_all", GB, FOUR_BOXES)["pairwise"]
    assert alone == pytest.approx(7 * (2e-6 + GB / 32 / 200e9) + 24 * (5e-6 + GB / 32 / 25e9))
    assert seconds("all_reduce", GB, APART) == pytest.approx(8 * 5e-6 + 2 * 15 / 16 * GB / 25e9)


def test_rings_through_nodes_use_all_ports() -> None:
    slower = RankGroup(32, 8, 4, FAST, NetworkLink("slower", 5e-6, 10e9, "a test"))
    time = algorithms("all_gather", GB, slower)["ring"]
    assert time == pytest.approx(3 * 5e-6 + 28 * 2e-6 + 31 / 32 * GB / (8 * 10e9))


groups = some.builds(
    lambda per_node, nodes, size, stride: Cluster(DEVICES["h100"], per_node, nodes, FAST, SLOW).group(
        min(size, (per_node * nodes - 1) // stride + 1), stride
    ),
    some.integers(1, 16),
    some.integers(1, 64),
    some.integers(1, 1024),
    some.integers(1, 32),
)


@given(kind=some.sampled_from(sorted(ALGORITHMS)), group=groups, size=some.floats(0, 1e12), more=some.floats(0, 1e12))
def test_more_bytes_never_take_less_time(kind: str, group: RankGroup, size: float, more: float) -> None:
    assert seconds(kind, size + more, group) >= seconds(kind, size, group) * (1 - 1e-12)


@given(kind=some.sampled_from(sorted(ALGORITHMS)), group=groups, size=some.floats(0, 1e12), factor=some.floats(1, 10))
def test_a_better_network_never_takes_longer(kind: str, group: RankGroup, size: float, factor: float) -> None:
    better = NetworkLink("better", SLOW.latency / factor, SLOW.bandwidth * factor, "a test")
    improved = RankGroup(group.size, group.per_node, group.nodes, group.inside, better)
    assert seconds(kind, size, improved) <= seconds(kind, size, group) * (1 + 1e-12)


@given(group=groups, size=some.floats(1, 1e12))
def test_times_respect_the_bandwidth_bound(group: RankGroup, size: float) -> None:
    """Everything except a node's own part passes its ports. Everything except a rank's own part passes its links."""
    assume(group.even)
    n, nodes = group.size, group.nodes
    best = max(group.inside.bandwidth, group.between.bandwidth)
    least = max((n - 1) / n * size / best, (nodes - 1) / nodes * size / group.per_node / group.between.bandwidth)
    assert seconds("all_gather", size, group) >= least * (1 - 1e-12)
    assert seconds("reduce_scatter", size, group) >= least * (1 - 1e-12)
    assert seconds("all_reduce", size, group) >= 2 * least * (1 - 1e-12)


@pytest.mark.parametrize("group", [BOX, FOUR_BOXES, APART])
def test_small_tensors_cost_latency_and_large_ones_bandwidth(group: RankGroup) -> None:
    steps = math.log2(group.per_node) * FAST.latency + math.log2(group.nodes) * SLOW.latency
    assert seconds("all_reduce", 0, group) <= 2 * steps
    assert seconds("all_gather", 0, group) == pytest.approx(steps)
    twice = seconds("all_reduce", 2e13, group) / seconds("all_reduce", 1e13, group)
    assert twice == pytest.approx(2, rel=1e-4)


def test_fastest_algorithms_by_size() -> None:
    assert fastest("all_reduce", 1e3, BOX)[0] == "recursive_doubling"
    assert fastest("all_reduce", GB, BOX)[0] == "halving_doubling"
    assert fastest("broadcast", 1e3, APART)[0] == "binomial"
    assert fastest("broadcast", GB, APART)[0] == "chain"
    assert fastest("all_to_all", 1e3, APART)[0] == "bruck"
    assert fastest("all_to_all", GB, APART)[0] == "pairwise"
    for group in (BOX, FOUR_BOXES, APART):
        for kind in ALGORITHMS:
            assert fastest(kind, 1e6, group)[1] == min(algorithms(kind, 1e6, group).values())


def test_a_group_of_one_costs_nothing() -> None:
    alone = CLUSTERS["selene-a100"].group(1)
    assert all(seconds(kind, GB, alone) == 0 for kind in ALGORITHMS)


@given(some.integers(1, 64), some.floats(1, 1e10))
def test_pipelined_sends_use_the_best_number_of_pieces(steps: int, size: float) -> None:
    a, b = 2e-6, 25e9
    best = min((steps + pieces - 1) * (a + size / pieces / b) for pieces in range(1, 3000))
    assert pipelined(steps, size, a, b) <= best * (1 + 1e-12)
    assert pipelined(steps, size, a, b) >= max(size / b, steps * a)
    assert pipelined(steps, size, 0.0, b) == size / b


def test_unknown_collectives_are_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'all_reduce'"):
        seconds("allreduce", 1.0, BOX)
