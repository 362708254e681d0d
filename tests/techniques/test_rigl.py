"""RigL: masks against a plain loop of the paper, and density with other techniques."""

import math
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from tiny_runs import advance, plain_run, technique, with_optimizer
from torch import Tensor, nn

from thrifty.composition.compose import Run, compose
from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.gradient_transform import GradientTransform, Scalars, Slots
from thrifty.core.state import TrainState
from thrifty.optim.mask_selection import drop_fraction, masked_shapes
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.optim.weight_masks import MaskedUpdate
from thrifty.techniques.sparsity.rigl import Rigl, moved_mask

STEPS = 8


def by_hand(mask: Tensor, weight: Tensor, gradient: Tensor, fraction: float) -> set[int]:
    """Run algorithm 1 on flat lists: drop the smallest active weights, grow the largest inactive gradients."""
    active = [i for i in range(mask.numel()) if mask.flatten()[i]]
    moved = round(fraction * len(active))
    active.sort(key=lambda i: -abs(float(weight.flatten()[i])))
    kept = set(active[: len(active) - moved])
    inactive = [i for i in range(mask.numel()) if i not in kept]
    inactive.sort(key=lambda i: -abs(float(gradient.flatten()[i])))
    return kept | set(inactive[:moved])


@given(
    rows=some.integers(1, 8), columns=some.integers(1, 8), fraction=some.floats(0, 1), seed=some.integers(0, 10_000)
)  # fmt: skip
def test_moved_mask_equals_algorithm_1(rows: int, columns: int, fraction: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, gradient = (torch.randn(rows, columns, generator=generator) for _ in range(2))
    mask = torch.rand(rows, columns, generator=generator) < 0.5
    found = moved_mask(mask, weight, gradient, fraction)
    assert int(found.sum()) == int(mask.sum())
    if not mask.all():
        assert set(found.flatten().nonzero().flatten().tolist()) == by_hand(mask, weight, gradient, fraction)


def test_moved_fraction_anneals_to_zero() -> None:
    assert drop_fraction(0, 0.3, 100) == pytest.approx(0.3)
    assert drop_fraction(50, 0.3, 100) == pytest.approx(0.15)
    assert drop_fraction(25, 0.4, 100) == pytest.approx(0.2 * (1 + math.sqrt(0.5)))
    assert drop_fraction(99, 0.3, 100) < 1e-3
    assert drop_fraction(100, 0.3, 100) == drop_fraction(1000, 0.3, 100) == 0.0


def counts(state: TrainState) -> dict[str, int]:
    assert state.optimizer is not None
    masks = zip(state.optimizer.names, state.optimizer.slots["masks.mask"], strict=True)
    return {name: int(mask.sum()) for name, mask in masks if mask.numel()}


def assert_dense_as_promised(run: Run, state: TrainState) -> None:
    run.verify(state)
    assert state.model is not None and state.optimizer is not None
    parameters = dict(state.model.named_parameters())
    for name, mask in zip(state.optimizer.names, state.optimizer.slots["masks.mask"], strict=True):
        if mask.numel():
            assert not parameters[name][~mask].any(), name
            for slot, tensors in state.optimizer.slots.items():
                tensor = tensors[state.optimizer.names.index(name)]
                if slot != "masks.mask":
                    assert not tensor[~mask].any(), f"{slot} of {name}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "others",
    [
        (), ("optimizers.lion",), ("gradients.clip",), ("large_batch.gradient_accumulation",), ("growth.stacking",),
        ("growth.stacking", "gradients.clip", "large_batch.gradient_accumulation", "schedules.linear"),
        ("initializations.layer_scale", "precision.mixed", "memory.recompute"),
    ],
    ids=" and ".join,
)  # fmt: skip
@pytest.mark.parametrize("distribution", ["erk", "uniform"])
def test_density_is_constant(others: tuple[str, ...], distribution: str) -> None:
    sparse = technique("sparsity.rigl", every=2, density=0.3, distribution=distribution, until=1.0)
    run = compose(plain_run(), with_optimizer([sparse, *map(technique, others)]), STEPS)
    state = run.start()
    first, seen = counts(state), []
    for step in range(1, STEPS + 1):
        advance(run, state, step)
        assert_dense_as_promised(run, state)
        assert state.optimizer is not None
        seen.append([mask.clone() for mask in state.optimizer.slots["masks.mask"]])
        assert {name: count for name, count in counts(state).items() if name in first} == first
    if "growth.stacking" not in others:
        moved = [
            step for step in range(1, STEPS)
            if any(not torch.equal(a, b) for a, b in zip(seen[step - 1], seen[step], strict=True))
        ]  # fmt: skip
        assert moved == [2, 4, 6]  # steps with a move, counted from 0


def test_moving_step_grows_at_zero_without_update() -> None:
    run = compose(plain_run(), with_optimizer([technique("sparsity.rigl", every=2, until=1.0)]), 4)
    state = run.start()
    advance(run, state, 2)
    assert state.model is not None and state.optimizer is not None
    before = {name: parameter.clone() for name, parameter in state.model.named_parameters()}
    old = dict(zip(state.optimizer.names, [m.clone() for m in state.optimizer.slots["masks.mask"]], strict=True))
    advance(run, state, 3)
    for name, mask in zip(state.optimizer.names, state.optimizer.slots["masks.mask"], strict=True):
        now = dict(state.model.named_parameters())[name]
        if mask.numel():
            assert torch.equal(now[mask & old[name]], before[name][mask & old[name]])
            assert not now[mask & ~old[name]].any() and (mask & ~old[name]).any()
        else:
            assert torch.equal(now, before[name])


def test_full_density_equals_the_dense_run() -> None:
    dense = compose(plain_run(), with_optimizer([]), 4)
    full = compose(plain_run(), with_optimizer([technique("sparsity.rigl", density=1.0, every=100)]), 4)
    found = []
    for run in (dense, full):
        state = run.start()
        found.append([record.loss for record in advance(run, state)])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(9, 4), nn.Linear(4, 8), nn.Linear(8, 2)


@pytest.mark.parametrize(
    ("build", "pattern"), [(Tower, "^(body|head)"), (lambda: nn.Sequential(Tower()), r"^(0\.body")]
)
def test_a_model_without_numbered_blocks_gets_a_pattern(build: Callable[[], nn.Module], pattern: str) -> None:
    with pytest.raises(RefusedError, match="no matrix has a name that matches") as error:
        Rigl(where="nothing").model(build())
    assert pattern in error.value.fix
    chosen = re.findall('r"(.*)"', error.value.fix)[0]
    model = build()
    Rigl(where=chosen).model(model)
    masked = Rigl(where=chosen).masked(masked_shapes(dict(model.named_parameters())))
    assert {name.split(".")[-2] for name in masked} == {"body", "head"}


def test_nonzero_masked_weight_raises_integrity_error() -> None:
    run = compose(plain_run(), with_optimizer([technique("sparsity.rigl")]), 4)
    state = run.start()
    assert state.model is not None
    with torch.no_grad():
        state.model.blocks[0].mlp.up.weight.masked_fill_(state.model.blocks[0].mlp.up.weight == 0, 1e-6)
    with pytest.raises(IntegrityError, match=r"sparsity\.rigl: blocks\.0\.mlp\.up\.weight has \d+ nonzero weights"):
        run.verify(state)


@pytest.mark.parametrize(("every", "words"), [(3, ""), (6, "masks never move: every 6 steps, until step 6")])
def test_note_says_that_masks_never_move(every: int, words: str) -> None:
    run = compose(plain_run(depth=1), with_optimizer([technique("sparsity.rigl", every=every)]), 8)
    run.build_model()
    said = [text for text in run.notes["sparsity.rigl"] if "never" in text]
    assert len(said) == bool(words) and all(words in text for text in said)


@pytest.mark.parametrize("settings", [{"density": 0.0}, {"density": 1.5}, {"where": "nowhere"}])
def test_invalid_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Rigl(**settings).model(plain_run().build())  # type: ignore[arg-type]


class Spreading(GradientTransform):
    """An update of every weight, like an orthogonalized one."""

    name = "spreading"

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        return [update + 1.0 for update in updates]


def test_dense_updates_stay_inside_the_mask() -> None:
    weight = torch.nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(0)))
    optimizer = TransformOptimizer(
        [("blocks.0.weight", weight)], MaskedUpdate(Spreading(), Rigl(density=0.5, until=10))
    )
    for _ in range(3):
        weight.grad = torch.ones(6, 6)
        optimizer.step()
    assert int(weight.count_nonzero()) <= 18
    assert not weight[~optimizer.slots["masks.mask"][0]].any()
