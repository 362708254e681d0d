"""SET: uniform random growth, determined by a key."""

import torch
from hypothesis import given
from hypothesis import strategies as some
from tiny_runs import advance, plain_run, technique, with_optimizer

from thrifty.composition.compose import compose
from thrifty.optim.weight_masks import masks_in
from thrifty.techniques.sparsity.set import regrown_mask


@given(rows=some.integers(1, 8), columns=some.integers(1, 8), fraction=some.floats(0, 1), seed=some.integers(0, 9999))
def test_density_is_constant_and_largest_weights_stay(rows: int, columns: int, fraction: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    mask = torch.rand(rows, columns, generator=generator) < 0.5
    found = regrown_mask(mask, weight, fraction, str(seed))
    assert int(found.sum()) == int(mask.sum())
    stay = int(mask.sum()) - round(fraction * int(mask.sum()))
    largest = weight.abs().masked_fill(~mask, -1.0).flatten().topk(stay).indices
    assert found.flatten()[largest].all()


def test_growth_is_uniform_over_inactive_connections() -> None:
    weight = torch.arange(1.0, 61.0).view(6, 10)
    mask = torch.zeros(6, 10, dtype=torch.bool)
    mask.view(-1)[30:] = True  # the smaller half is dropped: 45 free elements for 15 connections
    often = torch.stack([regrown_mask(mask, weight, 0.5, f"{key}").flatten().float() for key in range(3000)]).mean(0)
    assert (often[45:] == 1).all()
    # a third each; 3000 samples deviate by more than 5 standard deviations once in ten thousand tests
    assert (often[:45] - 1 / 3).abs().max() < 5 * (2 / 9 / 3000) ** 0.5


def test_moves_depend_on_seed_name_and_step() -> None:
    mask, weight = torch.eye(9, dtype=torch.bool), torch.ones(9, 9)
    keys = ["0/a/2", "1/a/2", "0/b/2", "0/a/4"]
    found = [regrown_mask(mask, weight, 0.5, key) for key in keys]
    torch.manual_seed(5)
    assert torch.equal(regrown_mask(mask, weight, 0.5, keys[0]), found[0])
    assert all(not torch.equal(found[0], other) for other in found[1:])

    def after_moves(seed: int) -> list[torch.Tensor]:
        run = compose(plain_run(depth=1), with_optimizer([technique("sparsity.set", until=1.0, seed=seed)]), 4)
        state = run.start()
        advance(run, state)
        return list(masks_in(state).values())

    first, other = after_moves(0), after_moves(1)
    assert not all(map(torch.equal, first, other))
