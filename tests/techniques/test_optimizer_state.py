"""Moments in int8 and bfloat16: storage, stochastic rounding of slow averages, and training quality."""

from collections.abc import Callable, Sequence

import pytest
import torch
from tiny_runs import advance, assert_same, losses, plain_run, restored, run_through, snapshot, technique
from torch import Tensor, nn

import thrifty
from thrifty.composition.compose import compose
from thrifty.composition.explain import explain
from thrifty.composition.technique_optimizer import TechniqueOptimizer
from thrifty.core.errors import RefusedError
from thrifty.core.gradient_transform import GradientTransform, Scalars, Slots, TransformScope, chain
from thrifty.core.technique import Technique
from thrifty.kernels.blockwise_quantization import code_book, dequantize, quantize
from thrifty.optim import chunked_update
from thrifty.optim.parameter_partition import partition
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.optim.transform_elements import ScaleByAdam, scale_by_learning_rate
from thrifty.techniques.optimizers.adafactor import adafactor
from thrifty.techniques.optimizers.adamw import adamw
from thrifty.techniques.optimizers.lamb import lamb
from thrifty.techniques.optimizers.lion import lion
from thrifty.techniques.optimizers.muon import muon
from thrifty.techniques.optimizers.schedule_free import schedule_free
from thrifty.techniques.optimizers.sgd import sgd
from thrifty.techniques.optimizers.soap import soap
from thrifty.techniques.precision.optimizer_state import (
    FORMATS,
    Bfloat16Format,
    Int8Format,
    OptimizerState,
    with_compact_state,
)

SHAPES = {"embedding.weight": (40, 32), "blocks.0.up.weight": (24, 300), "kernel": (6, 4, 3, 3), "bias": (300,)}
OPTIMIZERS: dict[str, Callable[[], GradientTransform]] = {
    "adafactor": lambda: adafactor(1e-2),
    "adamw": lambda: adamw(1e-2),
    "lamb": lambda: lamb(1e-2),
    "lion": lambda: lion(1e-2),
    "muon": lambda: muon(1e-2, dtype=torch.float32),
    "schedule-free": lambda: schedule_free(1e-2, warmup=3),
    "sgd": lambda: sgd(0.1, 0.9, nesterov=True),
    "soap": lambda: soap(1e-2, every=3),
}


def parameters(shapes: dict[str, tuple[int, ...]] = SHAPES) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    return [(name, nn.Parameter(torch.randn(shape, generator=generator))) for name, shape in shapes.items()]


def made(transform: GradientTransform, shapes: dict[str, tuple[int, ...]] = SHAPES) -> TransformOptimizer:
    return TransformOptimizer(parameters(shapes), transform)


def gradients_of(step: int, optimizer: TransformOptimizer) -> list[Tensor]:
    """Return noisy gradients around a constant, with magnitudes over several decades."""
    found = []
    for index, parameter in enumerate(optimizer.parameters):
        lasting, noise = (torch.Generator().manual_seed(seed) for seed in (index, 1000 * step + index))
        sizes = torch.randn(parameter.shape, generator=lasting).mul_(1.5).exp_()
        mean = torch.randn(parameter.shape, generator=lasting)
        found.append(sizes * (mean + torch.randn(parameter.shape, generator=noise)) * 1e-3)
    return found


def trained(optimizer: TransformOptimizer, steps: int) -> TransformOptimizer:
    for step in range(steps):
        for parameter, gradient in zip(optimizer.parameters, gradients_of(step, optimizer), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return optimizer


def joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps_stay_close_to_float32(name: str, form: str) -> None:
    make = OPTIMIZERS[name]
    start = joined(made(make()).parameters)
    plain = joined(trained(made(make()), 10).parameters)
    found = joined(trained(made(with_compact_state(make(), FORMATS[form], 1)), 10).parameters)
    assert (found - plain).norm() <= {"int8": 0.12, "bfloat16": 0.008}[form] * (plain - start).norm()
    assert (found == plain).all() == (name == "adafactor")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "make",
    [
        lambda named: thrifty.optim.AdamW(named, lr=1e-2),
        lambda named: thrifty.optim.Muon(named, lr=1e-2, precision="float32"),
    ],
    ids=["adamw", "muon"],
)
def test_a_missing_gradient_keeps_moments_quantized(make: Callable[..., TechniqueOptimizer], form: str) -> None:
    plain, packed = make(parameters()), make(parameters())
    thrifty.apply(packed, "optimizer_state", format=form, min_elements=1)
    start = joined(plain.parameters)
    for optimizer in (plain, packed):
        for step in range(10):
            gradients = gradients_of(step, optimizer)
            for index, (parameter, gradient) in enumerate(zip(optimizer.parameters, gradients, strict=True)):
                parameter.grad = None if step == 3 and index < 2 else gradient
            optimizer.step()
    wanted = joined(plain.parameters)
    distance = (joined(packed.parameters) - wanted).norm()
    assert 0 < distance <= {"int8": 0.15, "bfloat16": 0.01}[form] * (wanted - start).norm()


@pytest.mark.parametrize("form", FORMATS)
def test_only_large_moments_are_quantized(form: str) -> None:
    shapes = {
        "matrix": (64, 64),
        "just too small": (63, 65),
        "vector": (5000,),
        "thin": (1024, 8),
        "conv": (64, 4, 4, 4),
    }
    optimizer = made(with_compact_state(adamw(), FORMATS[form]), shapes)
    packed = {"int8": torch.uint8, "bfloat16": torch.bfloat16}[form]
    for slot in ("mean", "square"):
        found = dict(zip(optimizer.names, optimizer.slots[f"scale_by_adam.{slot}"], strict=True))
        assert {name: tensor.shape for name, tensor in found.items()} == {n: torch.Size(s) for n, s in shapes.items()}
        assert {name for name, tensor in found.items() if tensor.dtype == packed} == {"matrix", "conv"}
        assert {tensor.dtype for tensor in found.values()} == {packed, torch.float32}


def test_int8_takes_a_byte_and_a_scale_per_block() -> None:
    optimizer = made(with_compact_state(lion()), {"matrix": (64, 512)})
    assert sum(tensor.nbytes for tensors in optimizer.slots.values() for tensor in tensors) == 64 * 512 + 64 * 2 * 4


def test_weights_averages_and_factors_stay_exact() -> None:
    kept = {
        "schedule-free": ("schedule_free.ahead",),
        "adafactor": ("scale_by_factored_square.row", "scale_by_factored_square.column"),
        "soap": ("scale_by_soap.left_axes", "scale_by_soap.right_spread"),
    }
    for name, slots in kept.items():
        optimizer = trained(made(with_compact_state(OPTIMIZERS[name](), Int8Format, 1)), 2)
        assert all(tensor.dtype == torch.float32 for slot in slots for tensor in optimizer.slots[slot])
    run = compose(plain_run(), [technique(n) for n in ("optimizers.adamw", "averaging.ema")], 2)
    packed = [*run.techniques, technique("precision.optimizer_state")]
    slots = compose(plain_run(), packed, 2).start().optimizer.slots  # type: ignore[union-attr]
    assert {tensor.dtype for tensor in slots["exponential_average.mean"]} == {torch.float32}
    assert torch.uint8 in {tensor.dtype for tensor in slots["scale_by_adam.mean"]}


def test_eval_weights_and_rate_pass_through() -> None:
    plain, packed = (
        trained(made(chosen), 5)
        for chosen in (schedule_free(1e-2), with_compact_state(schedule_free(1e-2), Bfloat16Format, 1))
    )
    assert plain.learning_rate() == packed.learning_rate() == 1e-2
    found, wanted, current = packed.eval_weights(), plain.eval_weights(), packed.parameters
    assert found is not None and wanted is not None
    assert (joined(found) - joined(wanted)).norm() < 0.1 * (joined(found) - joined(current)).norm()


class CountingMean(GradientTransform):
    """A custom transform with a float32 mean, an integer and a float64 moment."""

    name = "counting_mean"
    reach = TransformScope.ROWS

    def init(self, names: Sequence[str], parameters: Sequence[Tensor]) -> Slots:
        return {
            "mean": [torch.ones_like(parameter) for parameter in parameters],
            "count": [torch.zeros_like(parameter, dtype=torch.int32) for parameter in parameters],
            "wide": [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters],
        }

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        torch._foreach_add_(slots["count"], 1)
        return [tensor.clone() for tensor in slots["mean"]]

    def after_step(self, slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None:
        torch._foreach_mul_(slots["mean"], 2.0)


@pytest.mark.parametrize("form", FORMATS)
def test_custom_elements_are_wrapped(form: str) -> None:
    optimizer = trained(made(with_compact_state(CountingMean(), FORMATS[form], 1), {"matrix": (8, 32)}), 3)
    assert {slot: tensors[0].dtype for slot, tensors in optimizer.slots.items() if "scales" not in slot} == {
        "counting_mean.mean": {"int8": torch.uint8, "bfloat16": torch.bfloat16}[form],
        "counting_mean.count": torch.int32,
        "counting_mean.wide": torch.float64,
    }
    assert (optimizer.slots["counting_mean.count"][0] == 3).all()
    start = made(GradientTransform(), {"matrix": (8, 32)}).parameters[0]
    torch.testing.assert_close(optimizer.parameters[0], start + 1 + 2 + 4)


def test_partition_members_are_wrapped_separately() -> None:
    mixed = partition(
        ("wide", lambda name, parameter: parameter.shape[-1] == 300, lion(1e-2)),
        ("rest", lambda name, parameter: True, chain(ScaleByAdam(), scale_by_learning_rate(0.1))),
    )
    optimizer = trained(made(with_compact_state(mixed, Int8Format, 1)), 3)
    momentum = dict(zip(optimizer.names, optimizer.slots["partition.wide.scale_by_lion.momentum"], strict=True))
    square = dict(zip(optimizer.names, optimizer.slots["partition.rest.scale_by_adam.square"], strict=True))
    assert momentum["blocks.0.up.weight"].dtype == torch.uint8 and momentum["embedding.weight"].numel() == 0
    assert square["embedding.weight"].dtype == torch.uint8 and square["blocks.0.up.weight"].numel() == 0


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["adamw", "lamb", "lion"])
def test_pieces_and_threads_are_exact(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for size, threads in ((10**6, 1), (1000, 1), (1000, 2)):
        monkeypatch.setattr(chunked_update, "CHUNK_ELEMENTS", size)
        torch.set_num_threads(threads)
        try:
            found.append(trained(made(with_compact_state(OPTIMIZERS[name](), FORMATS[form], 1)), 3))
        finally:
            torch.set_num_threads(1)
    for other in found[1:]:
        for slot, tensors in found[0].slots.items():
            assert all(torch.equal(*pair) for pair in zip(other.slots[slot], tensors, strict=True)), slot


def roots_after_a_fall(transform: GradientTransform) -> Tensor:
    """Return roots of second moments relative to exact ones, 2.5 time constants after half of the gradients fell.

    They fell to a tenth; the other half keeps the scales of the blocks constant.
    """
    parameter = nn.Parameter(torch.zeros(16, 256))
    optimizer = TransformOptimizer([("matrix", parameter)], transform)
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randn(16, 256, generator=generator).exp_()
    falling = torch.rand(16, 256, generator=generator) < 0.5
    exact = torch.zeros(16, 256)
    for step in range(4000):
        if step == 1500:
            sizes[falling] *= 0.1
        parameter.grad = sizes * torch.randn(16, 256, generator=generator)
        exact.mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
        optimizer.step()
    codes = optimizer.slots["scale_by_adam.square"][0]
    if codes.dtype == torch.uint8:
        codes = dequantize(codes, optimizer.slots["scale_by_adam.square.scales"][0], code_book(signed=False))
    return (codes.float() / exact).sqrt()[falling]


class Nearest8Bits(ScaleByAdam):
    """Adam whose second moment is rounded to the nearest 8-bit value after each step."""

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        updates = super().update(updates, slots, parameters, numbers)
        for square in slots["square"]:
            square.copy_(dequantize(*quantize(square, self.book), self.book))
        return updates

    book = code_book(signed=False)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "near"), [("int8", 0.15), ("bfloat16", 0.03)])
def test_slow_second_moment_follows_falling_gradients(form: str, near: float) -> None:
    assert (
        abs(float(roots_after_a_fall(with_compact_state(ScaleByAdam(0.9, 0.999), FORMATS[form])).median()) - 1) < near
    )


@pytest.mark.slow
def test_nearest_rounding_stalls() -> None:
    assert float(roots_after_a_fall(Nearest8Bits(0.9, 0.999)).median()) > 2


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("optimizer", ["optimizers.adamw", "optimizers.lion"])
def test_training_ends_close_to_float32(optimizer: str, form: str) -> None:
    plain = plain_run(batch=8, depth=2)
    reference = losses(run_through(plain, [technique(optimizer)], 80)[0])
    packed = [technique(optimizer), technique("precision.optimizer_state", format=form)]
    found = losses(run_through(plain, packed, 80)[0])
    assert sum(reference[-10:]) < 0.8 * 10 * reference[0]
    assert sum(found[-10:]) == pytest.approx(sum(reference[-10:]), rel=0.02)


def test_explain_counts_the_smaller_state() -> None:
    def counted(*chosen: Technique) -> float:
        return explain(compose(plain_run(), [technique("optimizers.adamw"), *chosen], 2)).footprint.optimizer

    plain, eight, sixteen = (
        counted(),
        counted(technique("precision.optimizer_state")),
        counted(technique("precision.optimizer_state", format="bfloat16")),
    )
    assert 0.5 < sixteen / plain < 0.52
    assert 0.25 < eight / plain < 0.31  # the blocks of a model of width 32 are short


@pytest.mark.parametrize("form", FORMATS)
def test_growth_copies_scales_and_resume_is_exact(form: str) -> None:
    def chosen() -> list[Technique]:
        return [
            technique("optimizers.adamw"),
            technique("growth.stacking", at=(2,), moments="copy"),
            technique("precision.optimizer_state", format=form),
        ]

    run = compose(plain_run(), chosen(), 4)
    state = run.start()
    advance(run, state, 2)
    saved = snapshot(state)
    run.changes(state)
    assert state.optimizer is not None
    for slot, tensors in state.optimizer.slots.items():
        values = dict(zip(state.optimizer.names, tensors, strict=True))
        for name in values:
            if name.startswith("blocks.2."):
                assert torch.equal(values[name], values[name.replace("blocks.2.", "blocks.0.")]), (slot, name)
    advance(run, state)
    again = compose(plain_run(), chosen(), 4)
    resumed = restored(again, saved)
    advance(again, resumed)
    assert_same(snapshot(resumed), snapshot(state))


@pytest.mark.parametrize("form", FORMATS)
def test_moments_outside_moved_masks_are_zero(form: str) -> None:
    chosen = [technique(n) for n in ("optimizers.adamw", "sparsity.rigl")]
    run = compose(plain_run(), [*chosen, technique("precision.optimizer_state", format=form)], 3)
    state = run.start()
    advance(run, state, 3)  # the mask moves in the third step, which makes no other update
    slots = state.optimizer.slots  # type: ignore[union-attr]
    seen = 0
    for slot in ("masks.rest.scale_by_adam.mean", "masks.rest.scale_by_adam.square"):
        for mask, moment in zip(slots["masks.mask"], slots[slot], strict=True):
            if mask.numel():
                seen += 1
                assert moment.dtype != torch.float32 and not moment[~mask].any() and moment[mask].any()
    assert seen


def test_model_without_large_matrices_is_refused() -> None:
    with pytest.raises(RefusedError, match="no matrix of the model has at least 4096 elements") as refused:
        OptimizerState().model(nn.Linear(63, 64))
    assert "--set techniques.precision.optimizer_state.min_elements=1" in refused.value.fix
    OptimizerState(min_elements=1).model(nn.Linear(63, 64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_moments_of_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    model = nn.Linear(256, 64).to(dtype)
    optimizer = thrifty.apply(thrifty.optim.AdamW(model), "optimizer_state")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RefusedError, match=r"the moments of 'weight' are \w+, and only float32 moments are quantized"):
        optimizer.step()
    mixed = nn.Linear(256, 64)
    groups = [{"params": [*model.named_parameters()]}, {"params": [("adapter", mixed.weight)]}]
    optimizer = thrifty.apply(thrifty.optim.AdamW(groups), "optimizer_state")
    mixed.weight.grad = torch.ones_like(mixed.weight)
    optimizer.step()
    assert optimizer.state[mixed.weight]["scale_by_adam.mean"].dtype == torch.uint8
    if dtype is torch.bfloat16:
        model, optimizer = thrifty.apply((model, thrifty.optim.AdamW(model)), "bfloat16_weights")
        optimizer = thrifty.apply(optimizer, "optimizer_state")
        optimizer.step()
        assert optimizer.state[model.weight]["in_float32.scale_by_adam.mean"].dtype == torch.uint8
