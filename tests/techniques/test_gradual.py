"""Gradual pruning: cubic schedule and pruned weights."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from tiny_runs import advance, plain_run, technique, with_optimizer

from thrifty.composition.compose import compose
from thrifty.core.errors import UsageError
from thrifty.optim.weight_masks import masks_in
from thrifty.techniques.sparsity.gradual import GradualPruning, cubic_density, magnitudes


def test_schedule_equals_the_paper() -> None:
    """The paper has sparsities: s(t) = s_f + (s_i - s_f) · (1 - (t - t0) / (n Δt))³; here s_i = 0.2, s_f = 0.9."""
    for step in range(100, 501, 25):
        sparsity = 0.9 + (0.2 - 0.9) * (1 - (step - 100) / 400) ** 3
        assert cubic_density(step, 100, 500, initial=0.8, final=0.1) == pytest.approx(1 - sparsity)
    assert cubic_density(0, 100, 500, 0.8, 0.1) == pytest.approx(0.8)
    assert cubic_density(501, 100, 500, 0.8, 0.1) == pytest.approx(0.1)
    assert cubic_density(300, 300, 300, 0.8, 0.1) == pytest.approx(0.1)


@given(start=some.integers(0, 50), length=some.integers(0, 50), every=some.integers(1, 60), steps=some.integers(1, 120))
def test_pruning_steps_are_periodic_with_start_and_end(start: int, length: int, every: int, steps: int) -> None:
    sparse = GradualPruning(density=0.1, start=start, until=start + length, every=every)
    due = [step for step in range(steps) if sparse.moves_at(step)]
    assert due == sorted({*range(start, start + length, every), start + length} & {*range(steps)})
    densities = [sparse.density_at(step) for step in due]
    assert densities == sorted(densities, reverse=True)


def test_pruned_weights_score_lowest() -> None:
    weight, mask = torch.tensor([[0.0, -2.0], [3.0, 9.0]]), torch.tensor([[True, True], [True, False]])
    assert magnitudes(weight, mask).tolist() == [[0.0, 2.0], [3.0, -1.0]]


@pytest.mark.parametrize("distribution", ["uniform", "erk", "global"])
def test_density_follows_the_schedule_without_regrowth(distribution: str) -> None:
    sparse = technique("sparsity.gradual", density=0.1, start=1, until=6, every=2, distribution=distribution)
    run = compose(plain_run(), with_optimizer([sparse]), 8)
    state = run.start()
    masks = {name: mask.clone() for name, mask in masks_in(state).items()}
    assert all(mask.all() for mask in masks.values())
    assert state.model is not None
    for step in range(8):
        before = {name: parameter.detach().clone() for name, parameter in state.model.named_parameters()}
        advance(run, state, step + 1)
        run.verify(state)
        now = masks_in(state)
        kept = sum(int(mask.sum()) for mask in now.values()) / sum(mask.numel() for mask in now.values())
        latest = max((at for at in (1, 3, 5, 6) if at <= step), default=None)
        wanted = 1.0 if latest is None else cubic_density(latest, 1, 6, 1.0, 0.1)
        assert kept == pytest.approx(wanted, abs=2e-3)
        assert not any((now[name] & ~masks[name]).any() for name in now)
        for name, parameter in state.model.named_parameters():  # pruning steps update too
            moved = parameter != before[name]
            assert moved.any() or (name in now and not now[name].any())
        masks = {name: mask.clone() for name, mask in now.items()}
    shares = {round(int(mask.sum()) / mask.numel(), 2) for mask in masks.values()}
    assert (len(shares) == 1) == (distribution == "uniform")


@pytest.mark.parametrize(
    ("moments", "words"),
    [
        ({"start": 0.8}, r"until is 0\.75, before the start at 0\.8"),
        ({"start": 5, "until": 4}, "until is 4, before the start at 5"),
        ({"until": 1.0}, "no update could reach the final density"),
    ],
)
def test_invalid_start_and_until_are_refused(moments: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        GradualPruning(**moments)


def test_initial_density_below_final_is_refused() -> None:
    with pytest.raises(UsageError, match=r"initial_density 0\.1 is below density 0\.5"):
        GradualPruning(initial_density=0.1, density=0.5)
