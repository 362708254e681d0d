"""SNIP: mask against a plain loop, and scoring steps."""

import pytest
import torch
from tiny_runs import advance, assert_same, plain_run, restored, snapshot, technique, with_optimizer
from torch import Tensor, nn

import thrifty
from thrifty.composition.compose import compose
from thrifty.core.gradient_transform import chain
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.optim.weight_masks import masks_in
from thrifty.techniques.optimizers.adamw import adamw
from thrifty.techniques.sparsity.snip import Snip, snip_scores


def by_hand(weights: dict[str, Tensor], batches: list[dict[str, Tensor]], density: float) -> set[tuple[str, int]]:
    """Return masks of the best scores over all layers, from gradients summed over batches."""
    ranked = []
    for name, weight in sorted(weights.items()):
        for place in range(weight.numel()):
            total = sum(float(gradients[name].flatten()[place]) for gradients in batches)
            ranked.append((-abs(total * float(weight.flatten()[place])), name, place))
    ranked.sort()
    return {(name, place) for _, name, place in ranked[: round(density * len(ranked))]}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("density", [0.07, 0.5, 1.0])
def test_mask_equals_a_plain_loop(steps: int, density: float) -> None:
    generator = torch.Generator().manual_seed(steps)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = {"a.0.weight": draw(6, 5), "a.1.weight": draw(3, 8), "head": draw(4, 4)}
    parameters = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}
    sparse = Snip(density=density, scoring_steps=steps)
    optimizer = TransformOptimizer(parameters.items(), sparse.update(chain(adamw(0.1, weight_decay=0.0))))
    batches = [{name: draw(*weight.shape) for name, weight in weights.items()} for _ in range(steps + 1)]

    def step(gradients: dict[str, Tensor]) -> None:
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].clone()
        optimizer.step()

    for at, gradients in enumerate(batches[:-1]):
        step(gradients)
        if at < steps - 1:
            assert all(torch.equal(parameters[name], weights[name]) for name in weights)
    masks = dict(zip(optimizer.names, optimizer.slots["masks.mask"], strict=True))
    assert not masks["head"].numel() and torch.equal(parameters["head"], weights["head"])
    masked = {name: weights[name] for name in weights if name != "head"}
    kept = {(name, place) for name in masked for place in masks[name].flatten().nonzero().flatten().tolist()}
    assert kept == by_hand(masked, batches[:-1], density)
    for name in masked:
        assert torch.equal(parameters[name], weights[name] * masks[name])
    step(batches[-1])
    for name in masked:  # Adam's first update moves every weight by the rate
        moved = (parameters[name] - weights[name] * masks[name]).abs()
        assert torch.allclose(moved, 0.1 * masks[name].double(), rtol=1e-5)


def test_gradients_are_summed_before_the_absolute_value() -> None:
    weight, first, second = torch.ones(2), torch.tensor([1.0, 0.6]), torch.tensor([-1.0, 0.6])
    assert snip_scores(weight, first + second).tolist() == pytest.approx([0.0, 1.2])


def test_emptied_layer_is_counted_in_a_note() -> None:
    run = compose(plain_run(), with_optimizer([technique("sparsity.snip", density=0.001)]), 3)
    state = run.start()
    records = advance(run, state)
    assert records[0].notes["empty_weights"] == 0 and records[0].notes["density"] == 1
    assert records[-1].notes["density"] == pytest.approx(0.001, rel=0.02)
    empty = sum(not mask.any() for mask in masks_in(state).values())
    assert records[-1].notes["empty_weights"] == empty > 0


def test_resume_between_scoring_steps_is_exact() -> None:
    chosen = with_optimizer([technique("sparsity.snip", scoring_steps=3)])
    run = compose(plain_run(), chosen, 5)
    state = run.start()
    advance(run, state, 2)
    saved = snapshot(state)
    advance(run, state)
    resumed = restored(run, saved)
    advance(run, resumed)
    assert_same(snapshot(resumed), snapshot(state))


def test_missing_gradients_are_zero_in_scoring_steps() -> None:
    results = []
    for is_missing in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6)), nn.Linear(6, 2))
        optimizer = thrifty.optim.AdamW(model, lr=0.1)
        thrifty.apply((model, optimizer), "snip", density=0.3, scoring_steps=2)
        for step in range(4):
            for index, parameter in enumerate(model.parameters()):
                gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 * step + index))
                is_used = step > 1 or index not in (1, 2)
                parameter.grad = gradient if is_used else None if is_missing else torch.zeros_like(gradient)
            optimizer.step()
        results.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(*results) and results[0].isfinite().all()
    late = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [("late", late)]})
    late.grad = torch.ones(3)
    optimizer.step()
    assert late.tolist() == pytest.approx([0.9] * 3)
