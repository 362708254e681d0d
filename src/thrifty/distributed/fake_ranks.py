"""Fake process groups: one rank of a mesh without the other ranks, to check shapes, sizes and errors."""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.distributed as dist

from thrifty.core.mesh import AXES, Mesh, clear_mesh, set_mesh


@contextmanager
def fake_rank(rank: int, sizes: Mapping[str, int]) -> Iterator[None]:
    """Within the context, make this process one rank of a mesh with the axis sizes `sizes`. Collectives return at once
    with meaningless values, so the context is only for fake tensors.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "a process that is a rank already cannot be another"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(sizes.values()))
    try:
        set_mesh(sizes, "cpu")
        yield
    finally:
        clear_mesh()
        dist.destroy_process_group()
        # the cache refers to the groups of this rank and would be hit by an equal mesh of the next one
        _clear_sharding_prop_cache()


def fake_first_rank(mesh: Mesh) -> AbstractContextManager[None]:
    """Within the context, make this process rank 0 of a mesh with the minimum number of ranks. Do nothing if this
    number is 1.
    """
    ranks = mesh.least_ranks
    return nullcontext() if ranks == 1 else fake_rank(0, mesh.sizes(ranks, sharded=False))


def ranks_of_stages(sizes: Mapping[str, int]) -> list[range]:
    """Return the ranks of each pipeline stage. The first rank of a stage holds the largest part of each unevenly
    divided tensor.
    """
    assert AXES[0] == "pipeline"
    each = math.prod(sizes.values()) // sizes["pipeline"]
    return [range(each * stage, each * (stage + 1)) for stage in range(sizes["pipeline"])]
