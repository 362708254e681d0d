"""Predicted peak memory per rank of a mesh, compared with two real ranks."""

from functools import cache

import pytest
from mesh_footprint_work import Case, predicted_and_held
from rank_processes import on_ranks

REPLICATE, SHARD, PIPELINE = (f"parallelism.{name}" for name in ("replicate", "shard", "pipeline"))
AGAIN, PARTS = {"memory.recompute": {}}, {"large_batch.gradient_accumulation": {"micro_batches": 2}}
CASES = {
    "replicate, gradients outweigh": Case({"replicate": 2}, {REPLICATE: {}, **AGAIN}, width=160),
    "zero 2, accumulated": Case({"shard": 2}, {SHARD: {"zero": 2}, **PARTS}),
    "zero 3, recompute": Case({"shard": 2}, {SHARD: {}, **AGAIN}),
    "1f1b": Case({"pipeline": 2}, {PIPELINE: {"micro_batches": 4}}),
    "gpipe": Case({"pipeline": 2}, {PIPELINE: {"micro_batches": 4, "schedule": "gpipe"}}),
}
LESS, MORE = 0.02, 0.07
"""Allowed relative errors of a prediction, below and above the maximum measured peak over ranks."""


@cache
def on_two_ranks() -> dict[str, list[tuple[float, int]]]:
    one, other = on_ranks(2, predicted_and_held, list(CASES.values()))
    return {name: [*ranks] for name, *ranks in zip(CASES, one, other, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_predicted_peak_of_a_rank(name: str) -> None:
    predicted, measured = (max(values) for values in zip(*on_two_ranks()[name], strict=True))
    assert (1 - LESS) * measured <= predicted <= (1 + MORE) * measured
