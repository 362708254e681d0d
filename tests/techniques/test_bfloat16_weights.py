"""bfloat16 weights: rounding of the float32 sum, small updates, and combinations with other techniques."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import write_corpus
from hypothesis import given
from hypothesis import strategies as some
from hypothesis.extra import numpy as arrays
from precision_work import CASES
from tiny_runs import advance, assert_same, losses, plain_run, restored, run_through, snapshot, technique
from torch import Tensor, nn

import thrifty
from thrifty.composition.compose import compose
from thrifty.composition.explain import count
from thrifty.core.backward import plain_backward
from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.footprint import Footprint
from thrifty.core.gradient_transform import GradientTransform, chain
from thrifty.core.recipe import Budget, DataSettings, ModelSettings, Recipe
from thrifty.core.technique import Technique
from thrifty.optim import chunked_update
from thrifty.optim.fused_updates import FusedUpdate
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.optim.transform_elements import ClipByGlobalNorm, ScaleByAdam, global_norm, scale_by_learning_rate
from thrifty.techniques.optimizers.adafactor import adafactor
from thrifty.techniques.optimizers.adamw import AdamW, adamw
from thrifty.techniques.optimizers.lamb import lamb
from thrifty.techniques.optimizers.lion import lion
from thrifty.techniques.optimizers.muon import muon
from thrifty.techniques.optimizers.schedule_free import schedule_free
from thrifty.techniques.optimizers.sgd import sgd
from thrifty.techniques.optimizers.soap import soap
from thrifty.techniques.precision.bfloat16_weights import (
    Bfloat16Weights,
    Float32Update,
    Rounding,
    round_stochastically,
    round_with_compensation,
    update_in_float32,
)
from thrifty.techniques.precision.optimizer_state import Bfloat16Format, with_compact_state
from thrifty.training.checkpoint import load
from thrifty.training.trained_model import load_trained_model
from thrifty.training.trainer import train

ROUNDINGS: tuple[Rounding, ...] = ("stochastic", "kahan", "nearest")
SHAPES = {
    "embedding.weight": (40, 32),
    "blocks.0.up.weight": (24, 300),
    "kernel": (6, 4, 3, 3),
    "bias": (300,),
    "gain": (),
}
OPTIMIZERS: dict[str, Callable[[], GradientTransform]] = {
    "adafactor": lambda: adafactor(1e-2),
    "adamw": lambda: adamw(1e-2),
    "adamw in bfloat16": lambda: with_compact_state(adamw(1e-2), Bfloat16Format, 1),
    "clipped": lambda: chain(ClipByGlobalNorm(1e6), lion(1e-2)),
    "lamb": lambda: lamb(1e-2),
    "muon": lambda: muon(1e-2, dtype=torch.float32),
    "schedule-free": lambda: schedule_free(1e-2, warmup=3),
    "sgd": lambda: sgd(0.1, 0.9, nesterov=True),
    "soap": lambda: soap(1e-2, every=3),
}


def made(transform: GradientTransform, dtype: torch.dtype = torch.bfloat16) -> TransformOptimizer:
    """Return parameters with bfloat16 values, in a format."""
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    return TransformOptimizer([(name, nn.Parameter(value.to(dtype))) for name, value in values.items()], transform)


def trained(optimizer: TransformOptimizer, steps: int) -> TransformOptimizer:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in optimizer.parameters:
            gradient = torch.randn(parameter.shape, generator=generator).bfloat16()
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return optimizer


finite = some.floats(-1e4, 1e4, width=32, allow_subnormal=False)
numbers = arrays.arrays("float32", (2, 3), elements=finite).map(torch.from_numpy)


@given(weights=numbers, updates=numbers, seed=some.integers(0, 1000))
def test_new_weight_is_the_rounded_float32_sum(weights: Tensor, updates: Tensor, seed: int) -> None:
    held = weights.bfloat16()
    sums = held.float() + updates
    # above it float32 loses the sum too
    sums = torch.where(sums.abs() * 2**14 >= held.float().abs(), sums, held.float())
    for target in (round_stochastically(sums, seed), sums.bfloat16()):
        added = held.clone()
        torch._foreach_add_([added], [target.float() - held], alpha=1.0)
        assert torch.equal(added, target)


@given(sums=numbers, seed=some.integers(-(2**15), 2**15 - 1))
def test_compensation_adds_8_bits(sums: Tensor, seed: int) -> None:
    near, cut = round_with_compensation(sums, seed)
    assert torch.equal(near, sums.bfloat16())
    assert ((near.float() + cut - sums).abs() <= 2.0**-16 * sums.abs() + 1e-37).all()


@given(sums=numbers, seed=some.integers(-(2**15), 2**15 - 1))
def test_stochastic_rounding_is_equal_for_any_rows(sums: Tensor, seed: int) -> None:
    found = round_stochastically(sums, seed)
    assert ((found.float() - sums).abs() <= 2.0**-7 * sums.abs() + 1e-37).all()
    assert torch.equal(round_stochastically(sums[1:], seed), found[1:])
    vector = sums.flatten()
    assert torch.equal(round_stochastically(vector[2:], seed), round_stochastically(vector, seed)[2:])
    assert torch.equal(round_stochastically(vector[3], seed), round_stochastically(vector, seed)[3])


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_first_step_is_the_rounded_float32_step(name: str, rounding: Rounding) -> None:
    plain, narrow = (
        trained(made(OPTIMIZERS[name](), torch.float32), 1),
        made(update_in_float32(OPTIMIZERS[name](), rounding)),
    )
    trained(narrow, 1)
    for wanted, found in zip(plain.parameters, narrow.parameters, strict=True):
        distance = 2.0**-8 if rounding != "stochastic" else 2.0**-7
        assert found.dtype == torch.bfloat16
        assert ((found.float() - wanted).abs() <= distance * wanted.abs() + 1e-5).all()
    moments = [t for slot, ts in narrow.slots.items() if "compensation" not in slot for t in ts if t.numel()]
    assert {tensor.dtype for tensor in moments} == (
        {torch.bfloat16, torch.float32} if "in" in name else {torch.float32}
    )


def moved_by(rounding: Rounding, update: float, steps: int) -> tuple[Tensor, Tensor]:
    """Return weights of 1 after `count` equal updates, and their distance from the exact sum with compensation."""
    weight = nn.Parameter(torch.ones(1, 4096, dtype=torch.bfloat16))
    optimizer = TransformOptimizer([("weight", weight)], update_in_float32(scale_by_learning_rate(1.0), rounding))
    gradient = torch.full_like(weight, -update)
    for _ in range(steps):
        weight.grad = gradient.clone()
        optimizer.step()
    exact = 1 - steps * gradient.double()
    kept = sum(tensors[0].double() for tensors in optimizer.slots.values())
    return weight.detach(), weight.detach().double() + kept - exact


def test_nearest_rounding_loses_small_updates() -> None:
    weights, _ = moved_by("nearest", 1e-3, 500)
    assert (weights == 1).all()


@pytest.mark.parametrize(("rounding", "spread"), [("stochastic", 0.1), ("kahan", 1e-3)])
@pytest.mark.parametrize("update", [1e-3, 1e-5])
def test_other_roundings_keep_small_updates_on_average(rounding: Rounding, spread: float, update: float) -> None:
    _, errors = moved_by(rounding, update, 500)
    assert abs(float(errors.mean())) < 3 * float(errors.std()) / errors.numel() ** 0.5
    assert 0 < errors.std() < spread


def test_kahan_weights_stay_next_to_the_float32_sum() -> None:
    weights, errors = moved_by("kahan", 1e-4, 500)
    assert (errors.abs() < 1e-3).all()
    nearest = torch.tensor(1 + 500 * float(torch.tensor(1e-4).bfloat16())).bfloat16()
    assert (weights == nearest).float().mean() > 0.9


@pytest.mark.slow
def test_rounding_errors_of_training_are_ordered() -> None:
    plain = plain_run(batch=8, depth=2)
    slow = technique("optimizers.adamw", lr=3e-4)
    reference = losses(run_through(plain, [slow], 80)[0])
    found = {
        rounding: losses(run_through(plain, [slow, Bfloat16Weights(rounding=rounding)], 80)[0])
        for rounding in ROUNDINGS
    }
    last = {rounding: abs(sum(each[-10:]) - sum(reference[-10:])) / 10 for rounding, each in found.items()}
    assert sum(reference[-10:]) / 10 < reference[0] - 0.5
    assert last["kahan"] < 0.02 and last["stochastic"] < 0.04
    assert sum(found["nearest"][-10:]) / 10 > sum(reference[-10:]) / 10 + 0.1  # the lost updates


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", ["adamw", "adamw in bfloat16", "lamb", "lion", "muon"])
def test_pieces_and_threads_are_exact(name: str, rounding: Rounding, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for size, threads in ((10**6, 1), (1000, 1), (1000, 2)):
        monkeypatch.setattr(chunked_update, "CHUNK_ELEMENTS", size)
        torch.set_num_threads(threads)
        try:
            found.append(
                trained(made(update_in_float32((OPTIMIZERS | {"lion": lambda: lion(1e-2)})[name](), rounding)), 3)
            )
        finally:
            torch.set_num_threads(1)
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(other.parameters, found[0].parameters, strict=True))
        for slot, tensors in found[0].slots.items():
            assert all(torch.equal(*pair) for pair in zip(other.slots[slot], tensors, strict=True)), slot


def test_only_clipping_runs_on_all_gradients_at_once() -> None:
    optimizer = made(update_in_float32(chain(ClipByGlobalNorm(1.0), muon(1e-2))))
    assert [type(element) for element in optimizer.site.head.elements.values()] == [ClipByGlobalNorm]
    assert {element.reach for element in optimizer.transform.elements.values()} == {
        chunked_update.TransformScope.ALL,
        chunked_update.TransformScope.TENSOR,
    }
    work = [piece.work for _, tail in optimizer.site.tail.tails for piece in tail.pieces]  # type: ignore[union-attr]
    chains = [element for each in work for element in each.chain.elements.values()]
    assert chains and all(isinstance(element, Float32Update) for element in chains)
    assert any(isinstance(element.kernel, FusedUpdate) for element in chains)


def test_optimizers_of_all_parameters_receive_float32() -> None:
    class Joint(ScaleByAdam):
        reach = chunked_update.TransformScope.ALL

        def update(self, updates: list[Tensor], *others) -> list[Tensor]:  # type: ignore[no-untyped-def, override]
            assert {tensor.dtype for tensor in (*updates, *others[1])} == {torch.float32}
            return super().update(updates, *others)

    optimizer = trained(made(update_in_float32(chain(Joint(), scale_by_learning_rate(1e-2)))), 3)
    reference = trained(made(update_in_float32(chain(ScaleByAdam(), scale_by_learning_rate(1e-2)))), 3)
    for found, wanted in zip(optimizer.parameters, reference.parameters, strict=True):
        assert (found - wanted).abs().max() < 0.02


def test_gradient_norm_is_more_precise_than_bfloat16() -> None:
    gradients = [torch.randn(100, generator=torch.Generator().manual_seed(0)).bfloat16() for _ in range(3)]
    found = global_norm(gradients)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.cat(gradients).float().norm())


@pytest.mark.parametrize("name", CASES)
def test_every_model_computes_in_bfloat16_with_its_buffers(name: str) -> None:
    model, objective, batch = CASES[name]()
    narrow, _, _ = CASES[name]()
    chosen = Bfloat16Weights()
    buffers = {key: buffer.clone() for key, buffer in narrow.named_buffers()}
    names, tied = list(narrow.state_dict()), len(list(narrow.parameters()))
    narrow = chosen.model(narrow)
    loss, expected = plain_backward(narrow.eval(), chosen.objective(objective), batch).loss, None
    expected = plain_backward(model.eval(), objective, batch).loss
    assert loss.dtype == torch.float32 and float(loss) == pytest.approx(float(expected), rel=3e-3)
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.bfloat16}
    assert list(narrow.state_dict()) == names and len(list(narrow.parameters())) == tied
    for key, buffer in narrow.named_buffers():
        assert buffer.dtype == buffers[key].dtype and torch.equal(buffer, buffers[key])
    finished = chosen.finish(narrow)
    assert {parameter.dtype for parameter in finished.parameters()} == {torch.float32}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_explain_halves_weights_and_gradients(rounding: Rounding) -> None:
    def counted(*chosen: Technique) -> Footprint:
        run = compose(plain_run(depth=1), [technique("optimizers.adamw"), *chosen], 2)
        return count(run, run.techniques)[1]

    plain, narrow = counted(), counted(Bfloat16Weights(rounding=rounding))
    assert narrow.parameters == plain.parameters / 2 and narrow.gradients == plain.gradients / 2
    assert narrow.optimizer == plain.optimizer * (1.25 if rounding == "kahan" else 1)
    assert narrow.activations < 0.75 * plain.activations
    smallest = counted(Bfloat16Weights(), technique("precision.optimizer_state", format="bfloat16"))
    assert 0.5 < smallest.optimizer / plain.optimizer < 0.52


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    "others",
    [
        ("optimizers.adamw", "growth.stacking", "precision.optimizer_state"),
        ("optimizers.muon", "gradients.clip", "averaging.ema", "schedules.linear"),
        ("optimizers.schedule_free", "memory.recompute"),
        ("optimizers.lamb", "sparsity.rigl", "averaging.latest"),
    ],
    ids=" ".join,
)
def test_resume_is_bit_identical_with_other_techniques(others: tuple[str, ...], rounding: Rounding) -> None:
    chosen = [*(technique(name) for name in others), Bfloat16Weights(rounding=rounding)]
    run = compose(plain_run(), chosen, 4)
    state = run.start()
    advance(run, state, 2)
    saved = snapshot(state)
    records = advance(run, state)
    assert not any(record.skipped for record in records)
    run.verify(state)
    again = compose(plain_run(), chosen, 4)
    resumed = restored(again, saved)
    advance(again, resumed)
    assert_same(snapshot(resumed), snapshot(state))


def test_averaged_weights_have_more_bits() -> None:
    chosen = [technique("optimizers.adamw"), technique("averaging.ema"), Bfloat16Weights()]
    _, state = run_through(plain_run(), chosen, 6)
    assert state.optimizer is not None
    values = state.optimizer.eval_weights()
    assert values is not None and {value.dtype for value in values} == {torch.float32}
    with state.optimizer.use_eval_weights():
        for parameter, value in zip(state.optimizer.parameters, values, strict=True):
            assert torch.equal(parameter, value.bfloat16())


@pytest.mark.slow
def test_update_can_be_compiled() -> None:
    torch._dynamo.reset()
    for rounding in ROUNDINGS:
        plain, compiled = (made(update_in_float32(lion(1e-2), rounding)) for _ in range(2))
        compiled.compile(backend="aot_eager")
        for wanted, found in zip(trained(plain, 3).parameters, trained(compiled, 3).parameters, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.slow
def test_finished_model_is_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path / "cache"))
    write_corpus(tmp_path / "corpus")
    recipe = Recipe(
        name="run",
        model=ModelSettings(preset="llama-nano", width=32, depth=2),
        data=DataSettings(source=str(tmp_path / "corpus"), vocabulary=320, length=32, batch=8),
        budget=Budget(steps=4),
        techniques=(AdamW(lr=1e-3), Bfloat16Weights(rounding="kahan")),
    )
    assert train(recipe, tmp_path, quiet=True)["status"] == "finished"
    kept = load(tmp_path / "run" / "checkpoints").tensors
    model, _ = load_trained_model(tmp_path / "run")
    for name, parameter in model.named_parameters():
        assert kept[f"parameters/{name}"].dtype == torch.bfloat16 and parameter.dtype == torch.float32
        assert torch.equal(parameter, kept[f"parameters/{name}"].float())


def test_batch_norm_is_refused() -> None:
    with pytest.raises(RefusedError, match="running statistics") as refused:
        technique("precision.bfloat16_weights").model(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    assert "--with precision.mixed" in refused.value.fix


def test_two_precision_techniques_are_refused() -> None:
    with pytest.raises(UsageError, match="both decide the precision"):
        compose(plain_run(), [technique("optimizers.adamw"), Bfloat16Weights(), technique("precision.mixed")], 2)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("optimizer", ["muon", "lamb", "adafactor", "schedule_free"])
def test_masked_weights_have_no_compensation(optimizer: str, rounding: Rounding) -> None:
    chosen = [technique(f"optimizers.{optimizer}"), Bfloat16Weights(rounding=rounding), technique("sparsity.static")]
    run = compose(plain_run(), chosen, 3)
    state = run.start()
    for _ in range(3):
        advance(run, state, 1)
        run.verify(state)


def moved_by_hand(kind: Any, rounding: Rounding, steps: Mapping[int, Sequence[int]], late: int = -1) -> list[Tensor]:
    """Return the weights of layers with gradients in their own `steps`. The layer `late` is added at its first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 24, bias=False), nn.Linear(32, 24, bias=False), nn.Linear(24, 32, bias=False))
    for index, layer in enumerate(model):
        layer.requires_grad_(index in steps and index != late)
    optimizer = kind(model, lr=0.1)
    thrifty.apply((model, optimizer), "bfloat16_weights", rounding=rounding)
    for step in range(6):
        for index, own in steps.items():
            weight = model[index].weight
            if index == late and step == own[0]:
                optimizer.add_param_group({"params": [(f"{index}.weight", weight.requires_grad_(True))]})
            gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(10 * step + index))
            weight.grad = gradient.bfloat16() if step in own else None
        optimizer.step()
    return [layer.weight.detach() for layer in model]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("kind", [thrifty.optim.AdamW, thrifty.optim.Muon])
def test_late_parameters_and_missing_gradients_keep_state(kind: Any, rounding: Rounding) -> None:
    steps = {0: (0, 1, 3, 4, 5), 1: (0, 1, 2, 3, 4, 5), 2: (3, 4, 5)}
    together = moved_by_hand(kind, rounding, steps, late=2)
    for index, own in steps.items():
        alone = moved_by_hand(kind, rounding, {index: own})[index]
        torch.testing.assert_close(together[index], alone, rtol=0, atol=0.05)
