"""Every technique with weight masks: weights stay masked at every step, with other techniques."""

import itertools

import pytest
import torch
from rank_processes import on_ranks
from sparsity_work import masks_of_each, masks_under_each
from tiny_runs import VOCABULARY, advance, plain_run, technique, with_optimizer
from torch import nn

from thrifty import techniques
from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, UsageError
from thrifty.core.state import TrainState, full_value
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.optim.mask_selection import global_count
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.optim.weight_masks import mask_of, masks_in
from thrifty.techniques.optimizers.adamw import adamw

MASKED = [name for name in techniques.names() if Claim.WEIGHT_MASKS in techniques.find(name).claims]
BY_FILE = {"sparsity.mask_from_file"}
"""Techniques whose masks come from a file, and are full without one."""
BY_PIECE = {"sparsity.dynamic_heads"}
"""Techniques whose density counts whole heads: test_dynamic_heads.py."""
CHOOSING = [name for name in MASKED if name not in BY_FILE | BY_PIECE]
OPTIMIZERS = ["adamw", "lion", "muon", "soap", "schedule_free", "lamb", "adafactor", "sgd", "lars"]
STRATEGIES = ("parallelism.replicate", "parallelism.shard")
COMPANY = [
    (), ("large_batch.gradient_accumulation", "precision.mixed"), ("growth.stacking", "averaging.ema"),
    ("growth.stacking", "averaging.latest", "large_batch.gradient_accumulation"),
]  # fmt: skip


def density(state: TrainState) -> float:
    masks, optimizer = masks_in(state), state.optimizer
    assert optimizer is not None
    parameters = dict(zip(optimizer.names, optimizer.parameters, strict=True))
    kept = sum(int(full_value(parameters[name]).count_nonzero()) for name in masks)
    return kept / sum(mask.numel() for mask in masks.values())


def assert_everything_is_inside(run: Run, state: TrainState) -> None:
    """Check weights against masks directly, and by the technique's own check."""
    run.verify(state)
    optimizer = state.optimizer
    assert optimizer is not None
    masks = masks_in(state)
    everything = {**optimizer.slots, "judged": optimizer.eval_weights() or optimizer.parameters}
    for slot, tensors in everything.items():
        for name, tensor in zip(optimizer.names, tensors, strict=True):
            if name in masks and tensor.shape == masks[name].shape and not slot.endswith("masks.mask"):
                assert not tensor[~masks[name]].any(), f"{slot} of {name}"


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CHOOSING)
@pytest.mark.parametrize(("optimizer", "others"), zip(OPTIMIZERS, itertools.cycle(COMPANY), strict=False))
def test_weights_stay_masked_at_every_step(name: str, optimizer: str, others: tuple[str, ...]) -> None:
    if optimizer == "schedule_free":  # it has its own average
        others = ("growth.stacking",)
    chosen = [technique(f"optimizers.{optimizer}"), technique(name, density=0.3), *map(technique, others)]
    try:
        run = compose(plain_run(depth=2), chosen, 6)
    except UsageError as refused:
        assert optimizer == "soap" and "its moments do not belong to single weights" in refused.what
        return
    state = run.start()
    assert_everything_is_inside(run, state)
    for step in range(1, 7):
        advance(run, state, step)
        assert_everything_is_inside(run, state)
    shapes = {key: tuple(mask.shape) for key, mask in masks_in(state).items()}
    most = 1.02 * global_count(shapes, 0.3) / global_count(shapes, 1.0)  # counts are rounded by layer
    assert shapes and density(state) <= most


@pytest.mark.slow
def test_ranks_have_single_process_masks() -> None:
    first, second = on_ranks(2, masks_under_each, STRATEGIES, CHOOSING)
    assert first == second
    alone = masks_of_each("", CHOOSING)
    for strategy, found in first.items():
        assert found.keys() == alone.keys() - ({"sparsity.grasp"} if strategy == "parallelism.shard" else set())
        for name, masks in found.items():
            assert {key: len(kept) for key, kept in masks.items()} == {k: len(kept) for k, kept in alone[name].items()}
            same = sum(len(masks[key] & alone[name][key]) for key in masks)
            # another order of summation may change the choice between two weights
            assert same >= 0.999 * sum(map(len, masks.values())), (strategy, name)


@pytest.mark.parametrize("name", ["sparsity.set", "sparsity.rigl", "sparsity.gradual"])
def test_excess_density_raises_integrity_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = compose(plain_run(depth=2), with_optimizer([technique(name, density=0.3)]), 6)
    greedy = next(each for each in run.techniques if each.name == name)
    keep_all = lambda self, names, layer, step: ((each, layer(each).mask | True) for each in names)  # noqa: E731
    monkeypatch.setattr(type(greedy), "next_masks", keep_all)
    state = run.start()
    # weights that were just grown are zero, so compare masks
    what = "nonzero weights" if name == "sparsity.gradual" else "the mask of .* keeps"
    with pytest.raises(IntegrityError, match=f"{name}: .*{what}"):
        advance(run, state)
    assert state.step == 3  # the update of step 2 moved masks; no step may follow it


@pytest.mark.parametrize("name", ["sparsity.rigl", "sparsity.gradual"])
def test_masks_move_in_own_loop(name: str) -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    with pytest.raises(UsageError, match=f"{name}: .* is 0.[0-9]+, a fraction of a run"):
        techniques.find(name)().update(adamw(lr=1e-2))
    steps = {"until": 4, "every": 2, "density": 0.25} | ({"start": 1} if name == "sparsity.gradual" else {})
    sparse = techniques.find(name)(**steps)
    optimizer = TransformOptimizer(sparse.model(model).named_parameters(), sparse.update(adamw(lr=1e-2)))
    first = mask_of(model.blocks[0].weight).clone()
    for step in range(6):
        sum(block(torch.eye(8) + step).square().sum() for block in model.blocks).backward()
        optimizer.step()
        optimizer.zero_grad()
    for block in model.blocks:
        assert int(block.weight.count_nonzero()) == 16 == int(mask_of(block.weight).sum())
    assert not torch.equal(first, mask_of(model.blocks[0].weight))


@pytest.mark.parametrize("name", ["sparsity.rigl", "sparsity.static"])
def test_erk_masks_allow_growth_in_other_proportions(name: str) -> None:
    """Stacks of 2 and 5 blocks start as 1 and 2, for which ERK has other densities."""

    def build() -> nn.Module:
        model = assemble(ModelConfig("t5", 2, 32, 4, 4, 64, VOCABULARY, 24, True, decoder_depth=5))
        initialize(model, 0)
        return model

    plain = plain_run()
    chosen = with_optimizer([technique(name, density=0.3), technique("growth.stacking", at=(2,))])
    run = compose(BaseRun(build, plain.source, plain.objective), chosen, 6)
    state = run.start()
    state.step = 2
    run.changes(state)
    run.verify(state)
    assert 0.99 * 0.3 <= density(state) <= 1.02 * 0.3
