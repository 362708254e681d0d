"""One rank of a mesh whose other ranks are not there, for what depends on its place alone: shapes, sizes, refusals."""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.distributed as dist

from thrifty.core.mesh import AXES, Mesh, clear_mesh, set_mesh


@contextmanager
def fake_rank(rank: int, sizes: Mapping[str, int]) -> Iterator[None]:
    """This process as one of the ranks of a mesh with these axes. Collectives return at once, and what they leave in
    their tensors means nothing: for fake tensors, whose values nobody asks for."""
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
        # what it remembers names the groups of this rank, and is found again by the next one's equal mesh
        _clear_sharding_prop_cache()


def fake_first_rank(mesh: Mesh) -> AbstractContextManager[None]:
    """This process as the first of the fewest ranks that a mesh can have; as it is where that is one."""
    ranks = mesh.least_ranks
    return nullcontext() if ranks == 1 else fake_rank(0, mesh.sizes(ranks, sharded=False))


def ranks_of_stages(sizes: Mapping[str, int]) -> list[range]:
    """The ranks of each stage of the pipeline, all of which hold the same parts of what is alike: the first of them
    the largest, where a tensor does not divide evenly."""
    assert AXES[0] == "pipeline"
    each = math.prod(sizes.values()) // sizes["pipeline"]
    return [range(each * stage, each * (stage + 1)) for stage in range(sizes["pipeline"])]
