"""Growth and dropped blocks in a pipeline of two ranks, equal to a single process.

Tests of the other axes try every technique.
"""

from functools import cache

import numpy as np
import pytest
from pipeline_work import Case, Found, found, on_mesh
from rank_processes import on_ranks

from thrifty.core.errors import UsageError

PIPELINE = {"parallelism.pipeline": {"cost_source": "counted"}}
DROPPED = {"growth.layer_drop": {"time_constant": 1}}
GROWING = {
    "dropped blocks": Case(PIPELINE | DROPPED),
    "compound": Case(PIPELINE | {"growth.compound": {"at": (2,), "moments": "mean"}}),
    "compound, pooled": Case(PIPELINE | {"growth.compound": {"at": (2,), "shorten": "pool"}}),
}
SEVERAL = {"parallelism.pipeline": {"cost_source": "counted", "schedule": "zbv"}} | DROPPED


@cache
def two_rank_results() -> dict[str, list[Found]]:
    ranks = on_ranks(2, on_mesh, {"pipeline": 2}, list(GROWING.values()))
    return {name: [rank[index] for rank in ranks] for index, name in enumerate(GROWING)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", GROWING)
def test_two_pipeline_stages_grow_like_one_process(name: str) -> None:
    assert_the_same(two_rank_results()[name], found(GROWING[name].without("parallelism.pipeline")))


def test_dropped_blocks_with_split_backward_are_refused() -> None:
    with pytest.raises(UsageError, match="a stage without remaining blocks"):
        Case(SEVERAL).compose()


def assert_the_same(ranks: list[Found], one: Found) -> None:
    assert not any(rank.refused for rank in ranks), ranks[0].refused
    for rank in ranks:
        assert rank.losses == pytest.approx(one.losses, rel=1e-6, abs=0)
        assert rank.norms == pytest.approx(one.norms, rel=1e-5)
        for name, tensor in rank.tensors.items():
            np.testing.assert_allclose(tensor, one.tensors[name], rtol=0, atol=1e-6, err_msg=name)
