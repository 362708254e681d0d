"""Device mesh: arrangement of ranks along named axes, and each rank's position."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_processes import on_ranks

from thrifty.core import mesh
from thrifty.core.errors import UsageError
from thrifty.core.mesh import AXES, Mesh, axis
from thrifty.core.ranks import random_stream

SIZE = st.integers(1, 4)


@given(SIZE, SIZE, SIZE, SIZE)
def test_explicit_sizes_are_kept(replicate: int, shard: int, tensor: int, pipeline: int) -> None:
    sizes = Mesh(replicate, shard, tensor, pipeline).sizes(replicate * shard * tensor * pipeline, sharded=True)
    assert sizes == {"pipeline": pipeline, "replicate": replicate, "shard": shard, "tensor": tensor}


@given(SIZE, SIZE, SIZE, st.booleans())
def test_remaining_ranks_go_to_a_data_axis(rest: int, tensor: int, pipeline: int, sharded: bool) -> None:
    sizes = Mesh(tensor=tensor, pipeline=pipeline).sizes(rest * tensor * pipeline, sharded)
    assert sizes["shard" if sharded else "replicate"] == rest
    assert math.prod(sizes.values()) == rest * tensor * pipeline


def test_one_open_data_axis_takes_the_remaining_ranks() -> None:
    assert Mesh(replicate=2).sizes(8, sharded=True)["shard"] == 4
    assert Mesh(shard=2).sizes(8, sharded=False)["replicate"] == 4


@pytest.mark.parametrize("refused_mesh", [Mesh(tensor=3), Mesh(replicate=2, tensor=4), Mesh(replicate=3, shard=1)])
def test_ranks_that_do_not_fit_the_mesh_are_refused(refused_mesh: Mesh) -> None:
    with pytest.raises(UsageError, match=r"4 ranks cannot be laid out as a mesh of .*="):
        refused_mesh.sizes(4, sharded=False)


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="mesh: tensor is 0"):
        Mesh(tensor=0)


def test_single_process_has_axes_of_size_one() -> None:
    assert all((axis(name).size, axis(name).place) == (1, 0) for name in (*AXES, "data"))


def places() -> list[tuple[int, int]]:
    without_mesh = [(axis("data").size, axis("tensor").size)]
    mesh.set_mesh({"pipeline": 2, "replicate": 1, "shard": 1, "tensor": 2}, "cpu")
    here = [(axis(name).place, axis(name).size) for name in ("pipeline", "tensor", "data")]
    draws = random_stream()
    mesh.clear_mesh()
    return [*without_mesh, *here, (draws, 0)]


def test_rank_order_of_tensor_and_pipeline_axes() -> None:
    results = on_ranks(4, places)
    assert [rank[0] for rank in results] == [(4, 1)] * 4
    assert [rank[1][0] for rank in results] == [0, 0, 1, 1] and [rank[2][0] for rank in results] == [0, 1, 0, 1]
    assert all(rank[3] == (0, 1) for rank in results)
    assert [rank[4][0] for rank in results] == [0, 0, 1, 1], "ranks of one layer share random draws, stages do not"
