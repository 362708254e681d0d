"""Static masks: random or by magnitude, by layer or global."""

import pytest
import torch
from tiny_runs import advance, plain_run, technique, with_optimizer

from thrifty.composition.compose import compose
from thrifty.optim.mask_selection import layer_counts
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.optim.weight_masks import masks_in


@pytest.mark.parametrize("by", ["random", "magnitude"])
@pytest.mark.parametrize("distribution", ["erk", "uniform", "global"])
def test_mask_has_the_density_and_never_changes(by: str, distribution: str) -> None:
    sparse = technique("sparsity.static", density=0.2, criterion=by, distribution=distribution)
    run = compose(plain_run(), with_optimizer([sparse]), 2)
    first = {name: parameter.detach().clone() for name, parameter in plain_run().build().named_parameters()}
    state = run.start()
    masks = {name: mask.clone() for name, mask in masks_in(state).items()}
    if distribution == "global":
        total = sum(mask.numel() for mask in masks.values())
        assert sum(int(mask.sum()) for mask in masks.values()) == round(0.2 * total)
    else:
        shapes = {name: tuple(mask.shape) for name, mask in masks.items()}
        assert {n: int(mask.sum()) for n, mask in masks.items()} == layer_counts(shapes, 0.2, distribution)
    if by == "magnitude":
        groups = [list(masks)] if distribution == "global" else [[name] for name in masks]
        for names in groups:
            kept, gone = (
                torch.cat([first[name][masks[name] == wanted].abs() for name in names]) for wanted in (True, False)
            )
            assert not kept.numel() or not gone.numel() or kept.min() >= gone.max()
    assert state.model is not None
    for name, parameter in state.model.named_parameters():
        assert torch.equal(parameter, first[name] * masks[name] if name in masks else first[name])
    advance(run, state)
    assert all(torch.equal(masks[name], mask) for name, mask in masks_in(state).items())


def test_fork_masks_by_the_weights_of_its_run() -> None:
    dense = compose(plain_run(depth=1), with_optimizer([]), 4)
    trained = dense.start()
    advance(dense, trained)
    sparse = technique("sparsity.static", density=0.2, criterion="magnitude", distribution="uniform")
    run = compose(plain_run(depth=1), with_optimizer([sparse]), 4)
    state = run.start()
    assert state.model is not None and trained.model is not None
    first = {name: mask.clone() for name, mask in masks_in(state).items()}
    state.model.load_state_dict(trained.model.state_dict())
    state.optimizer = TransformOptimizer(state.model.named_parameters(), run.transform())
    taken = {name: weight.detach() for name, weight in trained.model.named_parameters()}
    for name, mask in masks_in(state).items():
        assert taken[name][mask].abs().min() >= taken[name][~mask].abs().max()
        assert int(mask.sum()) == int(first[name].sum()) and not torch.equal(mask, first[name])
    run.verify(state)


def test_seed_changes_the_random_mask() -> None:
    found = []
    for seed in (0, 0, 1):
        run = compose(plain_run(depth=1), with_optimizer([technique("sparsity.static", seed=seed)]), 2)
        found.append(masks_in(run.start()))
    assert all(torch.equal(mask, found[1][name]) for name, mask in found[0].items())
    assert not any(torch.equal(mask, found[2][name]) for name, mask in found[0].items() if not mask.all())
