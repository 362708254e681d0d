"""Learning rates for other batch sizes, batch ramps, and both on ranks."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from large_batch_work import averages, noise_scales, with_each_strategy
from rank_processes import on_ranks
from tiny_runs import plain_run, run_through, technique, with_optimizer

from thrifty.composition.compose import Run, compose
from thrifty.core.batches import Batch, RankShard
from thrifty.core.errors import RefusedError
from thrifty.core.recipe import Recipe
from thrifty.optim.fused_updates import FusedAdamWUpdate, fused_tail
from thrifty.techniques.large_batch.batch_ramp import BatchRamp, size_at
from thrifty.techniques.large_batch.scale_learning_rate import scaled_rate, warmed_up_from_base
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.training.step_budget import steps_in_tokens


def test_linear_rule_matches_one_hour_imagenet() -> None:
    assert 0.1 * scaled_rate(8192, 256, "linear") == pytest.approx(3.2)


def test_square_root_rule_matches_lamb_table() -> None:
    """You et al. 2020, table 4: 5 / (2^3 · 10^3) at a batch of 512, doubling with every fourfold batch."""
    for doublings in range(7):
        wanted = 5 / (2 ** (3 - doublings / 2) * 1e3)
        assert 5 / (2**3 * 1e3) * scaled_rate(512 * 2**doublings, 512, "square_root") == pytest.approx(wanted)


@given(factor=some.floats(1.0, 100.0), warmup=some.integers(0, 50))
def test_warmup_is_linear_from_base_to_scaled_rate(factor: float, warmup: int) -> None:
    found = [warmed_up_from_base(step, factor, warmup) for step in range(warmup + 3)]
    assert found[warmup:] == [factor] * 3
    if warmup:
        assert found[0] == 1.0
        amounts = [after - before for before, after in pairwise(found[: warmup + 1])]
        assert amounts == pytest.approx([(factor - 1) / warmup] * warmup)


def test_smaller_batch_has_lower_rate_from_step_0() -> None:
    assert [warmed_up_from_base(step, 0.5, 4) for step in range(6)] == [0.5] * 6


def test_scaled_rate_multiplies_schedules_and_stays_fused() -> None:
    chosen = with_optimizer([technique("optimizers.adamw", lr=0.01), technique("schedules.linear", warmup=0)])
    scaled = technique("large_batch.scale_learning_rate", base_batch=2, rule="linear", warmup=2)
    plain, _ = run_through(plain_run(batch=8), chosen, 5)
    records, state = run_through(plain_run(batch=8), [*chosen, scaled], 5)
    factors = [found.learning_rate / wanted.learning_rate for found, wanted in zip(records, plain, strict=True)]
    assert factors == pytest.approx([1.0, 2.5, 4.0, 4.0, 4.0])
    found = fused_tail(state.optimizer.transform)  # type: ignore[union-attr]
    assert found is not None and isinstance(found[1], FusedAdamWUpdate)


def test_batch_setting_replaces_the_runs_batch() -> None:
    scaled = technique("large_batch.scale_learning_rate", base_batch=4, rule="linear", warmup=0, batch=64)
    records, _ = run_through(plain_run(batch=8), with_optimizer([technique("optimizers.adamw", lr=1e-4), scaled]), 1)
    assert records[0].learning_rate == pytest.approx(16e-4)


@given(
    start=some.floats(0.01, 600.0), full=some.integers(1, 512), until=some.integers(0, 60),
    multiple=some.sampled_from([1, 2, 8, 24]), shape=some.sampled_from(["doubling", "linear"]),
)  # fmt: skip
def test_ramp_sizes_are_multiples_up_to_the_full_batch(
    start: float, full: int, until: int, multiple: int, shape: str
) -> None:
    found = [size_at(step, start, full, until, multiple, shape) for step in range(until + 3)]  # type: ignore[arg-type]
    assert found == sorted(found) and found[until:] == [full] * 3
    assert all(0 < size <= full and (size % multiple == 0 or size == full) for size in found)
    if shape == "doubling" and until:
        assert all(size == full or size in (found[0] * 2**k for k in range(11)) for size in found)


def test_ramp_shapes_have_equal_phases() -> None:
    assert [size_at(step, 8, 64, 6, 8, "doubling") for step in range(7)] == [8, 8, 16, 16, 32, 32, 64]
    assert [size_at(step, 8, 64, 7, 8, "linear") for step in range(8)] == [8, 16, 24, 32, 40, 48, 56, 64]
    assert [size_at(step, 8, 64, 14, 8, "linear") for step in range(5)] == [8, 8, 16, 16, 24]


def ramped(*others: str, batch: int = 8) -> Run:
    ramp = technique("large_batch.batch_ramp", start=0.25, until=4, multiple=2)
    return compose(plain_run(batch=batch), with_optimizer([ramp, *map(technique, others)]), 7)


def joined(batches: list[Batch]) -> torch.Tensor:
    return torch.cat([batch["tokens"] for batch in batches])


def test_ramp_keeps_the_order_of_examples() -> None:
    found = [ramped().source.at(step) for step in range(7)]
    assert [len(batch) for batch in found] == [2, 2, 4, 4, 8, 8, 8]
    wanted = joined([plain_run(batch=8).source.at(step) for step in range(5)])
    assert torch.equal(joined(found), wanted[:36])
    assert all(torch.allclose(batch.weight, torch.full_like(batch.weight, 1 / len(batch))) for batch in found)


def test_ramp_with_gradient_norm_sampling_keeps_order() -> None:
    found = [ramped("data_selection.gradient_norm_sampling").source.at(step) for step in range(7)]
    assert [len(batch) for batch in found] == [6, 6, 12, 12, 24, 24, 24]
    wanted = joined([plain_run(batch=8).source.at(step) for step in range(14)])
    assert torch.equal(joined(found), wanted[:108])


@pytest.mark.parametrize(
    "others",
    [
        ("large_batch.gradient_accumulation",),
        ("curriculum.sequence_length",),
        ("data_selection.gradient_norm_sampling", "large_batch.gradient_accumulation", "curriculum.sequence_length"),
    ],
)
def test_steps_count_their_own_tokens(others: tuple[str, ...]) -> None:
    records, _ = run_through(ramped().plain, list(ramped(*others).techniques), 7)
    run = ramped(*others)
    assert [record.tokens for record in records] == [run.objective.tokens(run.source.at(step)) for step in range(7)]
    assert records[0].tokens < records[-1].tokens
    assert not any(record.skipped for record in records)


def test_ramp_step_equals_plain_step() -> None:
    """The first step has two examples; its loss is their mean."""
    (first, *_), _ = run_through(plain_run(batch=8), list(ramped().techniques), 7)
    (plain,), _ = run_through(plain_run(batch=2), with_optimizer([]), 1)
    assert first.loss == pytest.approx(plain.loss, rel=1e-6)
    assert first.gradient_norm == pytest.approx(plain.gradient_norm, rel=1e-5)


def test_sizes_not_divisible_by_ranks_are_refused() -> None:
    with pytest.raises(RefusedError, match="multiples of 2 examples cannot be divided equally among 4 ranks"):
        RankShard(ramped().source, 0, 4)


def test_two_ranks_equal_one_process() -> None:
    """tests/core/test_batches.py tests how ranks divide a ramp, test_parallelism.py its run on two ranks."""
    means, scales = averages(None), noise_scales(None)
    for found in on_ranks(2, with_each_strategy):
        for other_means, other_scales in found:
            assert other_means == pytest.approx(means, rel=1e-4)
            assert other_scales == pytest.approx(scales, rel=1e-2)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("until", [5, 0.3, 1.0])
@pytest.mark.parametrize("full", [0, 4, 32])
@pytest.mark.parametrize("budget", [700, 4_000, 33_333])
def test_token_budget_is_spent_exactly_with_a_ramp(until: int | float, full: int, budget: int) -> None:
    plain, per_step = plain_run(batch=8), 8 * 16
    ramp = BatchRamp(start=0.125, until=until, multiple=2, batch=full)
    steps = steps_in_tokens(budget, per_step, Recipe(techniques=(AdamW(), ramp)), plain, torch.device("cpu"))

    def spent(steps: int) -> int:
        source = compose(plain, (AdamW(), ramp), steps).source
        return sum(len(source.at(step)) for step in range(steps)) * 16

    assert spent(steps) <= budget < spent(steps + 1)
