"""Every technique that decides weight masks, in every company: nothing is outside a mask after any step."""

import itertools

import pytest

from rank_processes import on_ranks
from sparsity_work import masks_of_each, masks_under_each
from thrifty import techniques
from thrifty.core.compose import Composition, compose
from thrifty.core.errors import UsageError
from thrifty.core.sparse.masks import masks_in
from thrifty.core.sparse.sparsity import global_count
from thrifty.core.state import TrainState, full_value
from tiny_runs import advance, plain_run, technique

MASKED = [name for name in techniques.names() if "weight masks" in techniques.find(name).claims]
BY_FILE = {"sparsity.ticket"}
"""Whose masks come from a file, and are full without."""
CHOOSING = [name for name in MASKED if name not in BY_FILE]
OPTIMIZERS = ["adamw", "lion", "muon", "soap", "schedule_free", "lamb", "adafactor", "sgd"]
STRATEGIES = ("parallelism.replicate", "parallelism.shard")
COMPANY = [
    (), ("large_batch.accumulate", "precision.mixed"), ("growth.stacking", "large_batch.exponential_average"),
    ("growth.stacking", "large_batch.latest_weight_average", "large_batch.accumulate"),
]  # fmt: skip


def density(state: TrainState) -> float:
    masks, optimizer = masks_in(state), state.optimizer
    assert optimizer is not None
    parameters = dict(zip(optimizer.names, optimizer.parameters, strict=True))
    kept = sum(int(full_value(parameters[name]).count_nonzero()) for name in masks)
    return kept / sum(mask.numel() for mask in masks.values())


def assert_everything_is_inside(run: Composition, state: TrainState) -> None:
    """By this test's own eyes, and by the technique's."""
    run.verify(state)
    optimizer = state.optimizer
    assert optimizer is not None
    masks = masks_in(state)
    everything = {**optimizer.slots, "judged": optimizer.judged() or optimizer.parameters}
    for slot, tensors in everything.items():
        for name, tensor in zip(optimizer.names, tensors, strict=True):
            if name in masks and tensor.shape == masks[name].shape and not slot.endswith("masks.mask"):
                assert not tensor[~masks[name]].any(), f"{slot} of {name}"


@pytest.mark.parametrize("name", CHOOSING)
@pytest.mark.parametrize(("optimizer", "others"), [*zip(OPTIMIZERS, itertools.cycle(COMPANY), strict=False)])
def test_nothing_is_outside_the_masks_after_any_step(name: str, optimizer: str, others: tuple[str, ...]) -> None:
    if optimizer == "schedule_free":  # it brings its average
        others = ("growth.stacking",)
    chosen = [technique(f"optimizers.{optimizer}"), technique(name, density=0.3), *map(technique, others)]
    try:
        run = compose(plain_run(depth=2), chosen, 6)
    except UsageError as refused:
        assert optimizer == "soap" and "its moments are not those of single weights" in refused.what
        return
    state = run.start()
    assert_everything_is_inside(run, state)
    for step in range(1, 7):
        advance(run, state, step)
        assert_everything_is_inside(run, state)
    shapes = {key: tuple(mask.shape) for key, mask in masks_in(state).items()}
    most = 1.02 * global_count(shapes, 0.3) / global_count(shapes, 1.0)  # layers are rounded one by one
    assert shapes and density(state) <= most


def test_ranks_have_the_masks_of_the_single_process() -> None:
    first, second = on_ranks(2, masks_under_each, STRATEGIES, CHOOSING)
    assert first == second
    alone = masks_of_each("", CHOOSING)
    for strategy, found in first.items():
        assert found.keys() == alone.keys() - ({"sparsity.grasp"} if strategy == "parallelism.shard" else set())
        for name, masks in found.items():
            assert {key: len(kept) for key, kept in masks.items()} == {k: len(kept) for k, kept in alone[name].items()}
            same = sum(len(masks[key] & alone[name][key]) for key in masks)
            # gradients are summed in another order: the last bit may decide between two weights
            assert same >= 0.999 * sum(map(len, masks.values())), (strategy, name)
