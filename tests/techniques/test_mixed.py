"""Mixed precision in float16: loss scale, overflows, and every kind of model."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from overflow_work import Overflowing, float16, train_with_overflows
from precision_work import CASES
from rank_processes import on_ranks
from tiny_runs import advance, assert_same, losses, plain_run, run_through, snapshot, technique, with_optimizer
from torch import Tensor, nn

from thrifty.composition.compose import Run, compose
from thrifty.core.backward import plain_backward
from thrifty.core.errors import ThriftyError, UsageError
from thrifty.core.recipe import Recipe
from thrifty.core.state import TrainState, read_log
from thrifty.core.technique import Technique
from thrifty.techniques.precision.mixed import LossScale, MixedPrecision, next_scale, unscale
from thrifty.training import checkpoint
from thrifty.training.loop import PATIENCE
from thrifty.training.session_start import matrix_type

finite_or_not = some.lists(some.booleans(), max_size=40)


@given(steps=finite_or_not, growth_interval=some.integers(1, 5))
def test_scale_equals_torch_grad_scaler(steps: list[bool], growth_interval: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=growth_interval)
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scale = LossScale(16)
    for finite in steps:
        scaler.scale((weight * (1.0 if finite else float("inf"))).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scale = next_scale(scale, finite, growth_interval, least=-1000)
        assert (2.0**scale.exponent, scale.clean_steps) == (scaler.get_scale(), scaler._get_growth_tracker())


def test_hysteresis_tolerates_the_first_overflow() -> None:
    scale, seen = LossScale(5), []
    for finite in (False, True, False, False, True, True, False, False):
        scale = next_scale(scale, finite, growth_interval=2, hysteresis=2)
        seen.append(scale.exponent)
    assert seen == [5, 5, 4, 3, 3, 4, 4, 3]


@given(steps=finite_or_not, interval=some.integers(1, 5), hysteresis=some.integers(1, 4), least=some.integers(-3, 3))
def test_scale_is_a_power_of_two_above_the_minimum(
    steps: list[bool], interval: int, hysteresis: int, least: int
) -> None:
    scale = LossScale(3)
    for finite in steps:
        then = next_scale(scale, finite, interval, hysteresis, least)
        assert then.exponent - scale.exponent in ((0, 1) if finite else (0, -1))
        assert then.exponent >= least and then.clean_steps < interval and then.passed < hysteresis
        if then.exponent > scale.exponent:
            assert (then.clean_steps, then.passed) == (0, 0)
        scale = then


@pytest.mark.parametrize("wrong", [float("inf"), -float("inf"), float("nan")])
def test_unscaling_is_exact_and_detects_non_finite_values(wrong: float) -> None:
    gradients = [torch.randn(3, 4), torch.randn(5, dtype=torch.float64), torch.randn(2, dtype=torch.bfloat16)]
    expected = [gradient / 1024 for gradient in gradients]
    assert unscale(gradients, 1 / 1024) == 0
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))
    gradients[1][3] = wrong
    assert unscale(gradients, 1 / 1024) == 1


def run_of(*chosen: Technique, steps: int = 6) -> Run:
    return compose(plain_run(), with_optimizer(chosen), steps)


def exponents(state: TrainState) -> list[int]:
    return [int(tensor) for tensor in state.techniques["precision.mixed"].values()]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_overflow_skips_one_step_without_changes(value: float) -> None:
    schedule = technique("schedules.linear")
    run = run_of(float16(), schedule, Overflowing(at=(2,), value=value))
    state = run.start()
    records, held = [], {}
    for step in range(1, 7):
        before = {name: tensor.clone() for name, tensor in state.tensors().items() if "techniques" not in name}
        records += advance(run, state, step)
        held[step] = all(torch.equal(state.tensors()[name], tensor) for name, tensor in before.items())
    assert [record.step for record in records if record.skipped] == [3]
    assert [step for step, same in held.items() if same] == [3]
    assert state.optimizer is not None and state.optimizer.updates == 5
    assert records[3].learning_rate == records[2].learning_rate != records[1].learning_rate
    assert [record.notes["loss_scale"] for record in records] == [1024] * 3 + [512] * 3
    assert not records[3].notes.keys() - {"loss_scale"}


def test_skipped_step_does_not_change_later_steps() -> None:
    plain = plain_run(repeated=True)
    clean, _ = run_through(plain, with_optimizer([float16(init_scale=512.0)]), 5)
    spoiled, _ = run_through(plain, with_optimizer([float16(), Overflowing(at=(0,))]), 6)
    assert losses(spoiled)[1:] == losses(clean)


def test_micro_batch_overflow_skips_the_step() -> None:
    records = advance(
        run := run_of(float16(), technique("large_batch.gradient_accumulation"), Overflowing(at=(5,))), run.start()
    )
    assert [record.step for record in records if record.skipped] == [3]
    assert [record.notes["loss_scale"] for record in records] == [1024] * 3 + [512] * 3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["parallelism.replicate", "parallelism.shard"])
def test_overflow_on_one_rank_skips_on_all(strategy: str) -> None:
    first, second = on_ranks(2, train_with_overflows, strategy)
    assert first == second
    assert first["skipped"] == [3] and first["updates"] == 5
    assert first["scales"] == [1024] * 3 + [512] * 3
    assert first["answered"] == PATIENCE + 1  # each overflow lowered the scale: no divergence


def test_scale_is_restored_from_a_checkpoint(tmp_path: Path) -> None:
    chosen = with_optimizer([float16(growth_interval=3, hysteresis=2), Overflowing(at=(0, 1, 6))])
    expected = (run := compose(plain_run(), chosen, 9)).start()
    straight = advance(run, expected)
    state = (run := compose(plain_run(), chosen, 9)).start()
    first = advance(run, state, 4)
    assert exponents(state) == [-1, 2, 1]
    checkpoint.save(tmp_path, state.step, state.tensors(), state.scalars())
    found = checkpoint.find(tmp_path)
    state = (run := compose(plain_run(), chosen, 9)).init_state(read_log(found.scalars))
    checkpoint.fill(found, state.tensors())
    state.load_scalars(found.scalars)
    second = advance(run, state)
    scales = [record.notes["loss_scale"] for record in first + second]
    assert scales == [record.notes["loss_scale"] for record in straight] == [1024, 1024] + [512] * 3 + [1024] * 4
    assert_same(snapshot(state), snapshot(expected))


def test_scale_survives_structural_change() -> None:
    run = run_of(float16(), technique("growth.stacking", at=(3,)), Overflowing(at=(1,)))
    state = run.start()
    records = advance(run, state)
    assert [len(record.changes) for record in records] == [0, 0, 0, 1, 0, 0]
    assert [record.notes["loss_scale"] for record in records] == [1024] * 2 + [512] * 4
    assert exponents(state) == [-1, 4, 0]


def test_too_high_initial_scale_is_no_divergence() -> None:
    records = advance(run := run_of(float16(init_scale=2.0**40), steps=40), run.start())
    skipped = [record.step for record in records if record.skipped]
    assert skipped[: PATIENCE + 5] == list(range(1, PATIENCE + 6)) and len(skipped) < 30
    assert losses(records)[-1] < losses(records)[0] - 0.3


def test_overflow_at_min_scale_stops_the_run() -> None:
    run = run_of(float16(init_scale=16.0, min_scale=4.0, hysteresis=2), Overflowing(at=tuple(range(20))), steps=20)
    state = run.start()
    before = snapshot(state)
    with pytest.raises(ThriftyError, match="not finite even at min_scale, 4") as stopped:
        advance(run, state)
    assert state.step == 3  # one for the hysteresis, two halvings
    assert "precision.mixed.format=bfloat16" in stopped.value.fix and "lower the learning rate" in stopped.value.fix
    kept = snapshot(state).tensors
    assert all(torch.equal(kept[name], value) for name, value in before.tensors.items() if "techniques" not in name)


def test_invalid_scales_are_refused() -> None:
    for wrong in (1000.0, 0.0, -2.0, float("inf"), float("nan")):
        with pytest.raises(UsageError, match="init_scale") as refused:
            MixedPrecision(format="float16", init_scale=wrong)
        assert ("power of two" if math.isfinite(wrong) else "finite number") in refused.value.fix
    with pytest.raises(UsageError, match="above the init_scale of 2"):
        MixedPrecision(format="float16", init_scale=2.0, min_scale=4.0)


def test_bfloat16_records_no_scale() -> None:
    assert MixedPrecision().backward(plain_backward) is plain_backward
    records, state = run_through(plain_run(), with_optimizer([technique("precision.mixed")]), 2)
    assert all("loss_scale" not in record.notes for record in records) and not state.techniques


def gradients_of(name: str, mixed: MixedPrecision | None) -> tuple[float, Tensor]:
    model, objective, batch = CASES[name]()
    model.eval()  # without dropout
    backward = plain_backward
    if mixed is not None:
        objective, backward = mixed.objective(objective), mixed.backward(backward)
    outcome = backward(model, objective, batch)
    assert not outcome.overflow_handled
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(gradient.dtype == torch.float32 for gradient in found)
    assert objective.scores(objective.predict(model, batch), batch).isfinite().all()
    return float(outcome.loss), torch.cat([gradient.flatten() for gradient in found])


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_close_to_float32_on_every_model(name: str) -> None:
    loss, wanted = gradients_of(name, None)
    errors = {}
    for number_format in ("bfloat16", "float16"):
        found, gradient = gradients_of(name, MixedPrecision(format=number_format, init_scale=2.0**12))  # type: ignore[arg-type]
        assert found == pytest.approx(loss, rel=2e-3)
        errors[number_format] = float((gradient - wanted).norm() / wanted.norm())
    assert errors["float16"] < 0.01 and errors["float16"] < 0.5 * errors["bfloat16"] < 0.05


def test_scale_preserves_small_gradients() -> None:
    model, objective, batch = CASES["llama"]()
    small = replace(batch, weight=batch.weight * 2.0**-18)
    kept = {}
    for scale in (1.0, 2.0**16):
        model.zero_grad()
        mixed = MixedPrecision(format="float16", init_scale=scale)
        mixed.backward(plain_backward)(model, mixed.objective(objective), small)
        up = model.blocks[0].mlp.up.weight.grad
        kept[scale] = int(up.count_nonzero()) / up.numel()
    assert kept[1.0] < 0.8 < 0.99 < kept[2.0**16]


def test_tiled_attention_trains_in_float16() -> None:
    chosen = [technique("precision.mixed"), technique("attention.tiled")]
    expected, _ = run_through(plain_run(), with_optimizer(chosen), 4)
    found, _ = run_through(plain_run(), with_optimizer([float16(), technique("attention.tiled")]), 4)
    assert losses(found) == pytest.approx(losses(expected), rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["optimizers.adamw", "optimizers.sgd"])
def test_training_ends_close_to_bfloat16(optimizer: str) -> None:
    plain = plain_run(batch=8, depth=2)
    reference, found = (
        losses(run_through(plain, [technique(optimizer), precision], 80)[0])
        for precision in (technique("precision.mixed"), float16(growth_interval=20))
    )
    assert sum(reference[-10:]) < 0.95 * 10 * reference[0]
    assert sum(found[-10:]) == pytest.approx(sum(reference[-10:]), rel=0.02)


def test_inner_techniques_receive_unscaled_gradients() -> None:
    measured = []
    for precision in (technique("precision.mixed"), float16(growth_interval=2)):
        chosen = with_optimizer([precision, technique("measure.noise_scale"), technique("schedules.linear")])
        _, state = run_through(plain_run(batch=8), chosen, 6)
        memory = state.techniques["measure.noise_scale"]
        measured.append([float(memory["signal"]), float(memory["noise"])])
    assert measured[1] == pytest.approx(measured[0], rel=0.02)


def test_utilization_uses_the_runs_format() -> None:
    for technique_, wanted in ((MixedPrecision(), torch.bfloat16), (MixedPrecision(format="float16"), torch.float16)):
        assert matrix_type(Recipe(techniques=(technique_,))) == wanted
    assert matrix_type(Recipe()) == torch.float32
