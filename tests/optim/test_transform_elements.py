"""Gradient transforms against float64 arithmetic written out, torch's AdamW and lion_pytorch."""

import math

import pytest
import torch
from lion_pytorch import Lion as TheirLion
from torch import Tensor, nn

from thrifty.core.errors import UsageError
from thrifty.core.gradient_transform import GradientTransform, chain
from thrifty.modeling.parameter_kinds import is_matrix
from thrifty.optim.chunked_update import ChunkedUpdate
from thrifty.optim.fused_updates import FusedAdamTransform, FusedAdamWUpdate, FusedSGDUpdate, fuse_elements, fused_tail
from thrifty.optim.parameter_partition import partition
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.optim.transform_elements import (
    AddDecayedWeights,
    ClipByGlobalNorm,
    ScaleByAdam,
    ScaleByMomentum,
    ScaleBySchedule,
    ScaleByTrustRatio,
    global_norm,
    scale_by_learning_rate,
)
from thrifty.techniques.optimizers.adamw import adamw
from thrifty.techniques.optimizers.lion import ScaleByLion, lion

SHAPES = {"one.weight": (5, 3), "one.bias": (5,), "two.weight": (4, 5)}


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}


def gradients(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES.values()]


def applied(transform: GradientTransform, steps: int, born: int = 0) -> list[list[Tensor]]:
    """Return the updates of each step, with fixed parameters."""
    named = parameters()
    values = [parameter.detach() for parameter in named.values()]
    slots = transform.init(list(named), values)
    return [
        transform.update([g.clone() for g in gradients(step)], slots, values, transform.scalars(step, step - born))
        for step in range(steps)
    ]


def trained(
    transform: GradientTransform, steps: int, compiled: bool = False, dtype: torch.dtype = torch.float32
) -> dict[str, nn.Parameter]:
    named = parameters(dtype=dtype)
    optimizer = TransformOptimizer(named.items(), transform)
    if compiled:
        optimizer.compile(backend="aot_eager", fullgraph=True)
    for step in range(steps):
        for parameter, gradient in zip(named.values(), gradients(step, dtype), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return named


def assert_close(actual: dict[str, nn.Parameter], expected: dict[str, nn.Parameter], tolerance: float) -> None:
    for name in expected:
        assert (actual[name] - expected[name]).abs().max() <= tolerance, name


class Unfusable(ScaleByAdam):
    """A subclass of the element, which the fused kernel does not match."""


class UnfusableMomentum(ScaleByMomentum):
    """A subclass of the element, which the fused kernel does not match."""


def test_nested_chains_are_flattened_without_identity() -> None:
    a, b, c = ScaleByAdam(), AddDecayedWeights(0.1), scale_by_learning_rate(1.0)
    assert list(chain(chain(a, b), GradientTransform(), c).elements.values()) == [a, b, c]
    assert list(chain(chain(a), chain(b, chain(c))).elements) == list(chain(a, b, c).elements)


def test_elements_of_one_name_have_separate_state() -> None:
    twice = chain(ScaleByLion(0.9, 0.99), ScaleByLion(0.5, 0.5))
    assert list(twice.elements) == ["scale_by_lion", "scale_by_lion#2"]
    slots = twice.init(["x"], [torch.zeros(2)])
    assert set(slots) == {"scale_by_lion.momentum", "scale_by_lion#2.momentum"}
    twice.update([torch.ones(2)], slots, [torch.zeros(2)], {})
    assert slots["scale_by_lion.momentum"][0][0] != slots["scale_by_lion#2.momentum"][0][0]


def test_adam_equals_algorithm_1_of_paper() -> None:
    mean = [torch.zeros(s, dtype=torch.float64) for s in SHAPES.values()]
    square = [torch.zeros(s, dtype=torch.float64) for s in SHAPES.values()]
    for step, updates in enumerate(applied(ScaleByAdam(0.8, 0.95, 1e-6), 5)):
        for i, g in enumerate(gradients(step, torch.float64)):
            mean[i] = 0.8 * mean[i] + 0.2 * g
            square[i] = 0.95 * square[i] + 0.05 * g * g
            expected = (mean[i] / (1 - 0.8 ** (step + 1))) / ((square[i] / (1 - 0.95 ** (step + 1))).sqrt() + 1e-6)
            torch.testing.assert_close(updates[i].double(), expected, rtol=1e-5, atol=1e-6)


def test_lion_equals_program_1_of_paper() -> None:
    momentum = [torch.zeros(s, dtype=torch.float64) for s in SHAPES.values()]
    for step, updates in enumerate(applied(ScaleByLion(0.7, 0.9), 5)):
        for i, g in enumerate(gradients(step, torch.float64)):
            assert torch.equal(updates[i].double(), (0.7 * momentum[i] + 0.3 * g).sign())
            momentum[i] = 0.9 * momentum[i] + 0.1 * g


def test_weight_decay_applies_to_matrices_only() -> None:
    held = list(parameters().values())
    (updates,) = applied(AddDecayedWeights(0.1), 1)
    for update, gradient, parameter in zip(updates, gradients(0), held, strict=True):
        expected = gradient.double() + (0.1 * parameter.double() if parameter.ndim > 1 else 0.0)
        torch.testing.assert_close(update.double(), expected.detach(), rtol=1e-6, atol=1e-6)


def test_schedule_multiplies_by_factor_of_step() -> None:
    for step, updates in enumerate(applied(ScaleBySchedule(lambda step: 0.5**step), 4)):
        assert all(torch.equal(f, g * 0.5**step) for f, g in zip(updates, gradients(step), strict=True))


@pytest.mark.parametrize("largest", [0.5, 1e6])
def test_clipping_bounds_global_norm_and_keeps_small_gradients(largest: float) -> None:
    (updates,) = applied(ClipByGlobalNorm(largest), 1)
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients(0, torch.float64)))
    factor = min(1.0, largest / norm)
    for f, g in zip(updates, gradients(0, torch.float64), strict=True):
        torch.testing.assert_close(f.double(), g * factor, rtol=1e-5, atol=1e-7)
    assert float(global_norm(gradients(0))) == pytest.approx(norm, rel=1e-6)


def test_partition_sends_each_parameter_to_its_first_rule() -> None:
    split = partition(
        ("matrices", is_matrix, ScaleByLion()),
        ("rest", lambda name, parameter: True, chain(ScaleByAdam(), ScaleBySchedule(lambda step: 2.0))),
    )
    by_lion, by_adam = applied(ScaleByLion(), 3), applied(ScaleByAdam(), 3)
    for step, updates in enumerate(applied(split, 3)):
        assert torch.equal(updates[0], by_lion[step][0]) and torch.equal(updates[2], by_lion[step][2])
        assert torch.equal(updates[1], by_adam[step][1] * 2)


def test_partition_refuses_a_parameter_without_rule() -> None:
    with pytest.raises(UsageError, match=r"no rule matches parameter 'one.bias' of shape \(5,\)"):
        TransformOptimizer(parameters().items(), partition(("matrices", is_matrix, ScaleByLion())))


def test_partition_slots_have_one_entry_per_parameter() -> None:
    split = partition(("matrices", is_matrix, ScaleByLion()), ("rest", lambda n, p: True, ScaleByAdam()))
    slots = split.init(list(SHAPES), list(parameters().values()))
    assert {slot: [len(tensor) for tensor in tensors] for slot, tensors in slots.items()} == {
        "matrices.momentum": [5, 0, 4], "rest.mean": [0, 5, 0], "rest.square": [0, 5, 0],
    }  # fmt: skip


def test_adamw_fused_equals_element_wise_and_torch() -> None:
    rate = ScaleBySchedule(lambda step: 1 - step / 200)
    fused = chain(adamw(1e-2, (0.9, 0.95), 1e-8, 0.1), rate)
    plain = chain(Unfusable(0.9, 0.95), AddDecayedWeights(0.1), scale_by_learning_rate(1e-2), rate)
    assert isinstance(fused_tail(fused)[1], FusedAdamWUpdate)
    assert fused_tail(plain) is None
    theirs = parameters()
    groups = [
        {"params": [p for p in theirs.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)
    for step in range(100):
        for group in reference.param_groups:
            group["lr"] = 1e-2 * (1 - step / 200)
        for parameter, gradient in zip(theirs.values(), gradients(step), strict=True):
            parameter.grad = gradient
        reference.step()
    assert_close(trained(fused, 100), theirs, 1e-7)
    exact = [trained(transform, 100, dtype=torch.float64) for transform in (fused, plain)]
    assert_close(*exact, 1e-12)


def test_elements_before_fused_tail_still_apply() -> None:
    clipped = chain(ClipByGlobalNorm(0.1), adamw(1e-2))
    plain = chain(ClipByGlobalNorm(0.1), Unfusable(0.9, 0.95), AddDecayedWeights(0.1), scale_by_learning_rate(1e-2))
    head, _ = fused_tail(clipped)
    assert list(head.elements) == ["clip_by_global_norm"]
    exact = [trained(transform, 20, dtype=torch.float64) for transform in (clipped, plain)]
    assert_close(*exact, 1e-12)


@pytest.mark.parametrize(
    "elements",
    [
        (ScaleByAdam(), scale_by_learning_rate(0.1), ClipByGlobalNorm(1.0)),
        (ScaleByAdam(), scale_by_learning_rate(0.1), AddDecayedWeights(0.1)),
        (ScaleByAdam(correct=False), AddDecayedWeights(0.1), scale_by_learning_rate(0.1)),
        (ScaleByAdam(0.0), AddDecayedWeights(0.1), scale_by_learning_rate(0.1)),
        (ScaleByLion(), AddDecayedWeights(0.1), scale_by_learning_rate(0.1)),
        (ScaleByMomentum(), AddDecayedWeights(0.1), scale_by_learning_rate(0.1)),
        (ScaleByMomentum(), ScaleByLion(), scale_by_learning_rate(0.1)),
    ],
)
def test_only_exact_adamw_and_sgd_tails_are_fused(elements: tuple[GradientTransform, ...]) -> None:
    assert fused_tail(chain(*elements)) is None


@pytest.mark.parametrize("kind", ["scale_by_adam", "scale_by_momentum"])
def test_kernel_without_factors_adds_its_direction(kind: str) -> None:
    elements = {"scale_by_adam": (ScaleByAdam, Unfusable), "scale_by_momentum": (ScaleByMomentum, UnfusableMomentum)}
    fusable, plain = (chain(scale_by_learning_rate(0.1), element()) for element in elements[kind])
    assert fused_tail(fusable) and not fused_tail(plain)
    assert_close(trained(fusable, 10, dtype=torch.float64), trained(plain, 10, dtype=torch.float64), 1e-12)


@pytest.mark.parametrize("decay", [(), (AddDecayedWeights(0.1),)], ids=["plain", "decayed"])
def test_fused_plain_gradient_equals_gradient_descent(decay: tuple[GradientTransform, ...]) -> None:
    fused = chain(*decay, scale_by_learning_rate(0.1))
    assert isinstance(fused_tail(fused)[1], FusedSGDUpdate)
    expected = parameters(dtype=torch.float64)
    for step in range(5):
        for parameter, gradient in zip(expected.values(), gradients(step, torch.float64), strict=True):
            shrunk = 0.1 * parameter.detach() if decay and parameter.ndim > 1 else 0.0
            parameter.detach().sub_(0.1 * (gradient + shrunk))
    assert_close(trained(fused, 5, dtype=torch.float64), expected, 1e-12)


@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_adam_before_other_elements_runs_as_kernel(beta1: float) -> None:
    kinds = (ScaleByAdam, Unfusable)
    chains = [chain(adam(beta1, 0.95), ScaleByTrustRatio(), scale_by_learning_rate(0.1)) for adam in kinds]
    assert [type(fuse_elements(each).elements["scale_by_adam"]) for each in chains] == [FusedAdamTransform, Unfusable]
    assert_close(*(trained(each, 20, dtype=torch.float64) for each in chains), 1e-12)


def test_adam_with_beta1_of_0_has_no_first_moment() -> None:
    assert ScaleByAdam(0.0).init(list(SHAPES), list(parameters().values())).keys() == {"square"}


def test_each_partition_member_has_its_own_kernel() -> None:
    members = partition(
        ("matrices", is_matrix, chain(ScaleByLion(), AddDecayedWeights(0.1), scale_by_learning_rate(0.1))),
        ("rest", lambda name, parameter: True, chain(ScaleByAdam(), scale_by_learning_rate(0.1))),
    )
    optimizer = TransformOptimizer(parameters().items(), chain(members, ScaleBySchedule(lambda step: 1 / (1 + step))))
    (matrices, lion_tail), (rest, adam_tail) = optimizer.site.tail.tails
    assert (matrices, rest) == ([0, 2], [1])
    assert isinstance(lion_tail, ChunkedUpdate) and isinstance(adam_tail, FusedAdamWUpdate)


def test_nested_partitions_equal_running_all_elements_at_once() -> None:
    def nested(adam: type[ScaleByAdam]) -> GradientTransform:
        inner = partition(
            ("one", lambda name, parameter: name.startswith("one"), chain(adam(), AddDecayedWeights(0.1))),
            ("two", lambda name, parameter: True, ScaleByMomentum()),
        )
        outer = partition(("matrices", is_matrix, inner), ("rest", lambda name, parameter: True, adam()))
        return chain(AddDecayedWeights(0.2), outer, ScaleByTrustRatio(), scale_by_learning_rate(0.1))

    named = parameters(dtype=torch.float64)
    values = [parameter.detach() for parameter in named.values()]
    whole = nested(Unfusable)
    slots = whole.init(list(named), values)
    for step in range(10):
        torch._foreach_add_(
            values, whole.update(gradients(step, torch.float64), slots, values, whole.scalars(step, step))
        )
    assert_close(trained(nested(ScaleByAdam), 10, dtype=torch.float64), named, 1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_fused_equals_element_wise_and_torch(nesterov: bool) -> None:
    fused = chain(AddDecayedWeights(0.1), ScaleByMomentum(0.9, nesterov), scale_by_learning_rate(1e-2))
    assert isinstance(fused_tail(fused)[1], FusedSGDUpdate)
    plain = chain(AddDecayedWeights(0.1), UnfusableMomentum(0.9, nesterov), scale_by_learning_rate(1e-2))
    theirs = parameters(dtype=torch.float64)
    groups = [
        {"params": [p for p in theirs.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=nesterov)
    for step in range(50):
        for parameter, gradient in zip(theirs.values(), gradients(step, torch.float64), strict=True):
            parameter.grad = gradient
        reference.step()
    for transform in (fused, plain):
        assert_close(trained(transform, 50, dtype=torch.float64), theirs, 1e-12)


def test_lion_equals_lion_pytorch() -> None:
    theirs = parameters(dtype=torch.float64)
    groups = [
        {"params": [p for p in theirs.values() if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in theirs.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    reference = TheirLion(groups, lr=1e-3, betas=(0.9, 0.99))
    for step in range(100):
        for parameter, gradient in zip(theirs.values(), gradients(step, torch.float64), strict=True):
            parameter.grad = gradient
        reference.step()
    assert_close(trained(lion(1e-3, (0.9, 0.99), 0.5), 100, dtype=torch.float64), theirs, 1e-12)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "transform",
    [
        chain(Unfusable(0.9, 0.95), AddDecayedWeights(0.1), scale_by_learning_rate(1e-2)),
        chain(ClipByGlobalNorm(1.0), lion(1e-3), ScaleBySchedule(lambda step: 1 / (step + 1))),
        partition(("m", is_matrix, lion(1e-3)), ("rest", lambda n, p: True, chain(ScaleByAdam(), lion(1e-3)))),
    ],
    ids=["adamw", "clipped lion", "partition"],
)
def test_compiled_update_equals_eager_and_traces_once(transform: GradientTransform) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert_close(trained(transform, 20, compiled=True), trained(transform, 20), 1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_compiled_fused_optimizer_equals_eager() -> None:
    assert_close(trained(adamw(1e-2), 20, compiled=True), trained(adamw(1e-2), 20), 1e-6)
