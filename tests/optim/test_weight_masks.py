"""Masked weights: no optimizer and no loaded value leaves nonzero values outside the masks."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
import torch
from tiny_runs import advance, plain_run, snapshot, technique, tiny_model, with_optimizer
from torch import Tensor, nn

from thrifty.composition.compose import Run, compose
from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.gradient_transform import GradientTransform, chain
from thrifty.core.run_notes import collect_notes
from thrifty.core.state import TrainState, fill_tensor
from thrifty.optim.mask_selection import full_mask, masked_shapes, random_mask
from thrifty.optim.parameter_partition import partition
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.optim.transform_elements import ScaleByAdam, ScaleByMomentum
from thrifty.optim.weight_masks import MaskedLayer, MaskedUpdate, check_masks, mask_of, masks_in
from thrifty.techniques.memory.offload_optimizer import offloaded
from thrifty.techniques.optimizers.adamw import adamw
from thrifty.techniques.precision.bfloat16_weights import update_in_float32
from thrifty.techniques.precision.optimizer_state import with_compact_state


class Halves:
    """A policy: initially a quarter of the first matrix, in the second step the left half of it."""

    def __init__(self, instead: bool = True):
        self.replaces_update = instead
        self.seen: list[MaskedLayer] = []

    def masked(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        return [name for name in shapes if name.startswith("a")]

    def initial_masks(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {name: random_mask(parameter, 0.25, name) for name, parameter in parameters.items()}

    def moves_at(self, step: int) -> bool:
        return step == 1

    def next_masks(
        self, names: Sequence[str], layer: Callable[[str], MaskedLayer], step: int
    ) -> Iterator[tuple[str, Tensor]]:
        assert step == 1
        for name in names:
            self.seen.append(layer(name))
            mask = torch.zeros(8, 16, dtype=torch.bool)
            mask[:, :8] = True
            yield name, mask


def weights(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (8, 16), "b": (8, 16), "a bias": (8,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def step(optimizer: TransformOptimizer, named: Mapping[str, nn.Parameter], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    optimizer.step()
    return gradients


@pytest.mark.parametrize("instead", [True, False])
def test_updates_and_moments_stay_inside_moving_masks(instead: bool) -> None:
    named, masking = weights(), Halves(instead)
    whole = {name: parameter.detach().clone() for name, parameter in named.items()}
    optimizer = TransformOptimizer(named.items(), MaskedUpdate(chain(adamw(0.1)), masking))
    mask = optimizer.slots["masks.mask"][0]
    assert int(mask.sum()) == 32 and not optimizer.slots["masks.mask"][1].numel()
    assert torch.equal(named["a"], whole["a"] * mask) and torch.equal(named["b"], whole["b"])
    for at in range(4):
        before, old = named["a"].detach().clone(), mask.clone()
        gradients = step(optimizer, named, at)
        for slot, tensors in optimizer.slots.items():
            if slot != "masks.mask":
                assert not tensors[0][~mask].any() and tensors[1].any(), slot
        assert not named["a"][~mask].any()
        if at == 1:
            (seen,) = masking.seen
            assert torch.equal(seen.gradient, gradients["a"])  # dense, not masked
            assert torch.equal(seen.mask, old) and torch.equal(seen.weight, before)
            assert mask[:, :8].all() and not mask[:, 8:].any()
            assert torch.equal(named["a"], before * mask) == instead


def test_mask_of_parameter_changes_in_place() -> None:
    named = weights()
    optimizer = TransformOptimizer(named.items(), MaskedUpdate(chain(adamw(0.1)), Halves()))
    mask = mask_of(named["a"])
    assert mask is optimizer.slots["masks.mask"][0]
    assert mask_of(named["b"]) is mask_of(named["a bias"]) is None
    assert mask is not None
    step(optimizer, named, 0)
    version = mask._version
    step(optimizer, named, 1)
    assert mask is mask_of(named["a"]) and mask._version > version
    version = mask._version
    step(optimizer, named, 2)
    assert mask._version == version


@pytest.mark.parametrize(
    "wrap",
    [
        lambda masks: masks,
        lambda masks: chain(GradientTransform(), ScaleByMomentum(), masks),
        lambda masks: partition(
            ("first", lambda name, p: name == "a", chain(masks)), ("others", lambda name, p: True, adamw())
        ),
        lambda masks: with_compact_state(chain(masks), smallest=1),
        lambda masks: update_in_float32(chain(masks)),
        lambda masks: offloaded(chain(masks), "simulated"),
        lambda masks: offloaded(chain(masks), "simulated", delayed_after=0),
        lambda masks: offloaded(chain(masks), "disk"),
    ],
    ids=["alone", "chain", "partition", "stored", "in float32", "on copies", "delayed", "on a disk"],
)
def test_every_wrapper_applies_masks_to_loaded_values(
    wrap: Callable[[GradientTransform], GradientTransform], request: pytest.FixtureRequest
) -> None:
    low = "in float32" in request.node.name
    named = weights(torch.bfloat16 if low else torch.float32)
    optimizer = TransformOptimizer(named.items(), wrap(MaskedUpdate(chain(ScaleByAdam()), Halves())))
    step(optimizer, named, 0)
    (slot,) = [slot for slot in optimizer.slots if slot.endswith("masks.mask")]
    with torch.no_grad():
        for tensor in [*named.values(), *(t for s, ts in optimizer.slots.items() if s != slot for t in ts)]:
            tensor.fill_(1)
    optimizer.apply_constraints()
    mask = optimizer.slots[slot][0].clone()
    assert torch.equal(named["a"] != 0, mask) and named["b"].all()
    inner = [slot for slot in optimizer.slots if ".rest." in slot and not slot.endswith(".scales")]
    assert len(inner) == 2
    for name in inner:
        assert not optimizer.slots[name][0][~mask].any()
    after = named["a"].detach().clone()
    optimizer.apply_constraints()
    assert torch.equal(named["a"], after)
    step(optimizer, named, 2)  # masks move, and grow at zero
    assert not named["a"].detach()[~mask].any()


def sparse_state(*others: str) -> tuple[Run, TrainState]:
    run = compose(plain_run(), with_optimizer([technique("sparsity.static"), *map(technique, others)]), 4)
    state = run.start()
    advance(run, state, 2)
    run.verify(state)
    return run, state


@pytest.mark.parametrize("slot", ["mean", "square", "exponential_average.mean"])
def test_optimizer_state_outside_a_mask_is_detected(slot: str) -> None:
    run, state = sparse_state("averaging.ema")
    name = next(iter(masks_in(state)))
    assert state.optimizer is not None
    (key,) = [key for key in state.optimizer.slots if key.endswith(slot if "." in slot else f"adam.{slot}")]
    tensor = state.optimizer.slots[key][state.optimizer.names.index(name)]
    tensor[~masks_in(state)[name]] = 1e-9
    with pytest.raises(IntegrityError, match=rf"sparsity\.static: .*{slot} of {name} has \d+ values outside the mask"):
        run.verify(state)


def test_more_weights_than_allowed_are_detected() -> None:
    _, state = sparse_state()
    name = next(iter(masks_in(state)))
    count = int(masks_in(state)[name].sum())
    with pytest.raises(
        IntegrityError, match=f"{name} has {count} nonzero weights, but at most {count - 1} are allowed"
    ):
        check_masks("mine", state, {name: count - 1})
    plain = compose(plain_run(), with_optimizer([]), 2).start()
    check_masks("mine", plain, {})
    assert masks_in(plain) == {}


def test_averages_restarted_after_growth_respect_masks() -> None:
    chosen = [technique(name) for name in ("sparsity.rigl", "growth.stacking", "averaging.ema")]
    run = compose(plain_run(), with_optimizer(chosen), 5)
    state = run.start()
    for at in range(1, 6):
        advance(run, state, at)
        run.verify(state)


SPARSE = ["sparsity.rigl", "sparsity.set", "sparsity.static", "sparsity.gradual"]


@pytest.mark.parametrize("name", SPARSE)
def test_masks_of_a_sparse_run_apply_to_weights_of_a_dense_run(name: str) -> None:
    """Follow the steps of a fork: load values by name, create an optimizer, apply the constraints of its state."""
    dense = compose(plain_run(), with_optimizer([]), 4)
    state = dense.start()
    advance(dense, state, 2)
    old = snapshot(state)
    sparse = compose(plain_run(), with_optimizer([technique(name)]), 6)
    state = sparse.init_state([])
    for key, tensor in state.tensors().items():
        if key in old.tensors:
            fill_tensor(tensor, old.tensors[key])
    assert state.model is not None
    state.optimizer = TransformOptimizer(state.model.named_parameters(), sparse.transform())
    state.load_scalars(old.scalars)
    state.optimizer.born = state.optimizer.updates
    state.optimizer.apply_constraints()
    sparse.verify(state)
    for key, mask in masks_in(state).items():
        weight = dict(state.model.named_parameters())[key]
        assert torch.equal(weight, old.tensors[f"parameters/{key}"] * mask)
    advance(sparse, state, 3)


def test_invalid_name_pattern_is_refused() -> None:
    with pytest.raises(UsageError, match=r"sparsity\.static: where is not a regular expression"):
        technique("sparsity.static", where="(")


def test_embedding_in_a_numbered_list_is_not_masked_by_default() -> None:
    def model() -> nn.Module:
        model = nn.Module()
        model.layers = nn.ModuleList([nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 8)])
        return model

    with pytest.raises(RefusedError, match=r"mask the embedding .layers\.0\.weight.") as refused:
        technique("sparsity.static").model(model())
    where = refused.value.fix.partition("'")[2].removesuffix("'")
    one = technique("sparsity.static", where=where)
    assert one.masked(masked_shapes(dict(model().named_parameters()))) == ["layers.1.weight", "layers.2.weight"]
    technique("sparsity.static", where="weight").model(model())  # an explicit pattern may name an embedding


def test_dense_weights_are_reported_by_name() -> None:
    model = tiny_model(depth=2, tied=False)
    model.blocks[0].experts = nn.Parameter(torch.zeros(2, 4, 4))
    with collect_notes() as notes:
        technique("sparsity.static").model(model)
    assert len(notes) == 1 and "such as blocks.0.attention.qkv.weight" in notes[0]
    assert notes[0].endswith("and embedding.token.weight, blocks.N.experts, head.weight")


def test_full_mask_is_all_true() -> None:
    assert full_mask(torch.zeros(2, 3)).all()
