"""ZeRO stages and replicate on real ranks: equal to one process in float64, and predicted bytes."""

import statistics
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_processes import on_ranks
from shard_work import (
    BATCH,
    DEMANDING,
    STEPS,
    Bytes,
    Formats,
    Trained,
    Way,
    losses_with_dropout,
    on_four,
    on_two,
    resume_each,
    trained,
)
from tiny_runs import plain_run, technique
from torch import nn
from worker_results import computed_once

from thrifty.composition.compose import compose
from thrifty.core.backward import BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError
from thrifty.core.footprint import Footprint
from thrifty.core.objective import Objective
from thrifty.techniques.large_batch.gradient_accumulation import accumulated

REPLICATE = Way(technique("parallelism.replicate"))
ZERO: dict[int, Way] = {zero: Way(technique("parallelism.shard", zero=zero)) for zero in (1, 2, 3)}


def low(zero: int) -> Way:
    return Way(technique("parallelism.shard", zero=zero, gather_dtype="bfloat16"))


FLAT = {"replicate": REPLICATE, **{f"zero {zero}": way for zero, way in ZERO.items()}}
HYBRID = {f"hybrid zero {zero}": Way(way.divides, {"replicate": 2, "shard": 2}) for zero, way in ZERO.items()}
BYTES = {
    # bytes between two micro-batches: P float32 parameters over n ranks, Adam and accumulation
    "replicate": (REPLICATE, lambda n: 16),
    "zero 1": (ZERO[1], lambda n: 8 + 12 / n),
    "zero 2": (ZERO[2], lambda n: 4 + 16 / n),
    "zero 3": (ZERO[3], lambda n: 16 / n),
    "zero 1 in bfloat16": (low(1), lambda n: 6 + 12 / n),
    "zero 2 in bfloat16": (low(2), lambda n: 2 + 16 / n),
    "zero 3 in bfloat16": (low(3), lambda n: 16 / n),
    "hybrid zero 2": (HYBRID["hybrid zero 2"], lambda n: 4 + 16 / n),
}
PARTS = 2


@pytest.fixture(scope="module")
def two() -> list[tuple[dict[str, Trained], Trained, Formats, Formats]]:
    return computed_once("shard, two", lambda: on_ranks(2, on_two, FLAT, low(3)))


@pytest.fixture(scope="module")
def four() -> list[tuple[dict[str, Trained], dict[str, Bytes], list[list[str]]]]:
    ways = {name: way for name, (way, _) in BYTES.items()}
    return computed_once("shard, four", lambda: on_ranks(4, on_four, FLAT | HYBRID, ways, PARTS))


@cache
def alone(names: tuple[str, ...] = DEMANDING, style: str = "llama", steps: int = STEPS) -> Trained:
    return trained(Way(None), names, style, steps)


def assert_the_same(found: Trained, expected: Trained) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)
    assert found.held_out == pytest.approx(expected.held_out, rel=1e-10)
    assert found.parameters.keys() == expected.parameters.keys()
    for name, value in expected.parameters.items():
        np.testing.assert_allclose(found.parameters[name], value, rtol=0, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("ranks", ["two", pytest.param("four", marks=pytest.mark.slow)])
def test_float64_run_equals_one_process(ranks: str, request: pytest.FixtureRequest) -> None:
    """The run has LAMB, clipping, accumulation, tied embeddings, and evaluations between steps."""
    assert alone().losses[-1] < alone().losses[0] - 0.5
    for found, *_ in request.getfixturevalue(ranks):
        for way, run in found.items():
            assert run.parts == (0 if way == "replicate" else 5), way
            assert_the_same(run, alone())


def test_encoder_decoder_is_sharded_by_block(two: list) -> None:
    for _, found, *_ in two:
        assert found.parts == 2 + 2 + 1
        assert_the_same(found, alone(style="t5", steps=6))


@pytest.mark.slow
def test_losses_with_dropout_have_equal_distribution() -> None:
    draws, ways = 100, (REPLICATE, ZERO[1])
    (single,) = losses_with_dropout([Way(None)], draws)
    spread = statistics.stdev(single)
    assert spread > 0.003
    one, other = on_ranks(2, losses_with_dropout, ways, draws)
    assert one == other
    for found in one:
        assert len(set(found)) == draws
        assert abs(statistics.mean(found) - statistics.mean(single)) < 4 * spread * (2 / draws) ** 0.5
        assert 0.6 < statistics.stdev(found) / spread < 1.6  # about four standard errors


@pytest.mark.slow
def test_memory_and_traffic_match_the_formulas(four: list) -> None:
    for _, found, _ in four:
        for name, (way, formula) in BYTES.items():
            assert found[name].held == pytest.approx(formula(2 if way.axes else 4), rel=0.02), name
        outside = found["zero 3"].outside
        passes = {1: (1, 1), 2: (1, PARTS), 3: (PARTS * (2 - outside), PARTS)}
        for format_, size in (("", 4), (" in bfloat16", 2)):
            for zero, (gathered, reduced) in passes.items():
                sent = (gathered * size + reduced * 4) * (1 - 1 / 4)
                assert found[f"zero {zero}{format_}"].sent == pytest.approx(sent, rel=0.02), zero
        assert found["replicate"].sent == pytest.approx(2 * 4 * (1 - 1 / 4), rel=0.02)
        assert found["hybrid zero 2"].sent == pytest.approx((1 + PARTS) * 4 / 2 + PARTS * 4 / 2, rel=0.02)


@pytest.mark.slow
def test_resume_on_other_numbers_of_ranks_is_exact(tmp_path: Path) -> None:
    """4, 2, 1 and 4 ranks resume each other, three steps each, with the same examples."""
    left: dict[str, dict[str, str]] = {}
    seen: dict[str, list[list[int]]] = {way: [] for way in FLAT}
    for ranks in (4, 2, 1, 4):
        first, *others = on_ranks(ranks, resume_each, FLAT, tmp_path / "checkpoints", 3)
        assert all(other == first for other in others)
        for way, run in first.items():
            assert run.before == left.get(way, run.before)
            left[way] = run.after
            seen[way] += run.examples
    source = plain_run(batch=BATCH).source
    expected = [source.at(step)["tokens"].flatten().tolist() for step in range(12)]
    assert all(examples == expected for examples in seen.values())


def test_bfloat16_gathering_keeps_float32_parameters(two: list) -> None:
    for *_, plain, low in two:
        assert (plain.given, plain.kept) == ({torch.float32}, {torch.float32})
        assert (low.given, low.kept) == ({torch.bfloat16}, {torch.float32})
        assert low.losses == pytest.approx(plain.losses, rel=3e-3) and low.losses != plain.losses
    assert two[0][-1].losses == two[1][-1].losses


def test_two_precision_techniques_are_refused() -> None:
    chosen = [technique(name) for name in ("precision.mixed", "optimizers.adamw")]
    shard = technique("parallelism.shard", gather_dtype="bfloat16")
    with pytest.raises(UsageError, match="both decide the precision"):
        compose(plain_run(), [shard, *chosen], 1)


@pytest.mark.slow
def test_pipeline_requires_zero_1(four: list) -> None:
    for *_, (first, *others) in four:
        assert not first
        for zero, (what, fix) in zip((2, 3), others, strict=True):
            assert f"zero={zero} reduces the gradients of each micro-batch" in what
            assert fix == "--set techniques.parallelism.shard.zero=1"


def test_gradients_are_reduced_after_the_last_micro_batch() -> None:
    seen: list[bool] = []

    def note(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        seen.append(batch.last)
        return BackwardResult(torch.zeros(()))

    batch = Batch({"tokens": torch.zeros(7, 3)}, torch.full((7,), 1 / 7))
    accumulated(note, 3)(nn.Identity(), Objective(), batch)
    accumulated(accumulated(note, 2), 2)(nn.Identity(), Objective(), batch)
    assert seen == [False, False, True, False, False, False, True]
    assert batch.rows(0, 3).last and batch.to("cpu").weighted(batch.weight).last


def test_one_rank_is_exact() -> None:
    shard = technique("parallelism.shard")
    assert shard.footprint(Footprint(parameters=8, gradients=8)) == Footprint(parameters=8, gradients=8)
