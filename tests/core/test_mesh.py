"""The mesh: ranks arranged along named axes, and what each rank then sees."""

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
def test_sizes_that_are_given_are_the_sizes(replicate: int, shard: int, tensor: int, pipeline: int) -> None:
    sizes = Mesh(replicate, shard, tensor, pipeline).sizes(replicate * shard * tensor * pipeline, sharded=True)
    assert sizes == {"pipeline": pipeline, "replicate": replicate, "shard": shard, "tensor": tensor}


@given(SIZE, SIZE, SIZE, st.booleans())
def test_what_is_left_goes_to_whoever_divides_the_data(rest: int, tensor: int, pipeline: int, sharded: bool) -> None:
    sizes = Mesh(tensor=tensor, pipeline=pipeline).sizes(rest * tensor * pipeline, sharded)
    assert sizes["shard" if sharded else "replicate"] == rest
    assert math.prod(sizes.values()) == rest * tensor * pipeline


def test_copies_of_a_divided_state_leave_the_rest_to_its_pieces() -> None:
    assert Mesh(replicate=2).sizes(8, sharded=True)["shard"] == 4
    assert Mesh(shard=2).sizes(8, sharded=False)["replicate"] == 4


@pytest.mark.parametrize("asked", [Mesh(tensor=3), Mesh(replicate=2, tensor=4), Mesh(replicate=3, shard=1)])
def test_ranks_that_do_not_fit_are_refused_with_the_mesh(asked: Mesh) -> None:
    with pytest.raises(UsageError, match=r"4 ranks cannot be laid out as a mesh of .*="):
        asked.sizes(4, sharded=False)


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="mesh: tensor is 0"):
        Mesh(tensor=0)


def test_one_process_is_alone_on_every_axis() -> None:
    assert all((axis(name).size, axis(name).place) == (1, 0) for name in (*AXES, "data"))


def places() -> list[tuple[int, int]]:
    unlaid = [(axis("data").size, axis("tensor").size)]
    mesh.set_mesh({"pipeline": 2, "replicate": 1, "shard": 1, "tensor": 2}, "cpu")
    here = [(axis(name).place, axis(name).size) for name in ("pipeline", "tensor", "data")]
    draws = random_stream()
    mesh.clear_mesh()
    return [*unlaid, *here, (draws, 0)]


def test_neighbours_in_rank_share_a_layer_and_stages_lie_farthest_apart() -> None:
    found = on_ranks(4, places)
    assert [rank[0] for rank in found] == [(4, 1)] * 4
    assert [rank[1][0] for rank in found] == [0, 0, 1, 1] and [rank[2][0] for rank in found] == [0, 1, 0, 1]
    assert all(rank[3] == (0, 1) for rank in found)
    assert [rank[4][0] for rank in found] == [0, 0, 1, 1], "ranks of one layer draw alike, stages do not"
