"""Placement of rank groups on nodes, compared with counted ranks, and named clusters."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as some

from thrifty.core.errors import UsageError
from thrifty.simulators.cluster.device_specs import DEVICES
from thrifty.simulators.cluster.network_topology import CLUSTERS, LINKS, Cluster, find_cluster

SELENE = CLUSTERS["selene-a100"]


@pytest.mark.parametrize(
    ("size", "stride", "per_node", "nodes"),
    [
        (8, 1, 8, 1),
        (4, 2, 4, 1),
        (2, 4, 2, 1),
        (16, 1, 8, 2),
        (64, 8, 1, 64),
        (4, 4, 2, 2),
        (12, 3, 3, 5),
        (1, 1, 1, 1),
    ],
)
def test_placement_of_groups_on_nodes_of_eight(size: int, stride: int, per_node: int, nodes: int) -> None:
    group = SELENE.group(size, stride)
    assert (group.size, group.per_node, group.nodes) == (size, per_node, nodes)
    assert (group.inside, group.between) == (SELENE.inside, SELENE.between)


@given(per_node=some.integers(1, 9), nodes=some.integers(1, 9), size=some.integers(1, 81), stride=some.integers(1, 40))
def test_placement_equals_the_count_of_ranks(per_node: int, nodes: int, size: int, stride: int) -> None:
    cluster = Cluster(DEVICES["h100"], per_node, nodes, LINKS["nvlink4"], LINKS["infiniband-ndr"])
    ranks = [stride * place for place in range(size)]
    if ranks[-1] >= cluster.ranks:
        with pytest.raises(UsageError, match=f"the cluster has {cluster.ranks}"):
            cluster.group(size, stride)
        return
    group = cluster.group(size, stride)
    counted = Counter(rank // per_node for rank in ranks)
    assert (group.per_node, group.nodes) == (max(counted.values()), len(counted))
    assert group.even == (len(set(counted.values())) == 1)


def test_smaller_clusters_have_whole_nodes() -> None:
    assert SELENE.of(512).nodes == 64
    assert (SELENE.of(4).per_node, SELENE.of(4).nodes) == (4, 1)
    with pytest.raises(UsageError, match="use 96 or 104"):
        SELENE.of(100)
    with pytest.raises(UsageError, match="1 or more"):
        SELENE.of(0)
    with pytest.raises(UsageError, match="there is no group of"):
        SELENE.group(2, 0)


def test_sizes_of_published_clusters() -> None:
    assert CLUSTERS["dgx2h-v100"].ranks == 512
    assert CLUSTERS["selene-a100"].ranks == 3072
    assert CLUSTERS["h100-roce"].ranks == 16384
    assert CLUSTERS["h100-box"].ranks == 8
    assert 8 * CLUSTERS["selene-a100"].between.bandwidth == 8 * 200e9 / 8
    assert 16 * CLUSTERS["dgx2h-v100"].between.bandwidth == 8 * 100e9 / 8
    with pytest.raises(UsageError, match="did you mean 'selene-a100'"):
        find_cluster("selene")


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
def test_every_link_has_a_source_and_message_times(link) -> None:
    assert link.source
    assert link.seconds(0) == link.latency > 0
    assert link.seconds(link.bandwidth) == pytest.approx(1 + link.latency)


def test_nvlink_is_faster_than_pcie_and_network() -> None:
    for generation, bus in ((3, "pcie4"), (4, "pcie5")):
        assert LINKS[f"nvlink{generation}"].bandwidth > 5 * LINKS[bus].bandwidth
    assert LINKS["pcie4"].bandwidth < LINKS["infiniband-hdr"].bandwidth
