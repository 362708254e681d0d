"""Block techniques act on the blocks of both sides of an encoder-decoder."""

import pytest
import torch
from stacked_models import KINDS
from torch import nn

from thrifty.core.state import TrainState
from thrifty.modeling.module_surgery import find_stacks, tied_names
from thrifty.techniques.compile import CompiledBlocks
from thrifty.techniques.growth.stacking import ProgressiveStacking
from thrifty.techniques.memory.recompute import Recompute
from thrifty.techniques.memory.share_parameters import ShareParameters
from thrifty.techniques.optimizers.layerwise_lr_decay import depths

SIDES = ("our marian", "our t5", "t5", "marian")


@pytest.mark.parametrize("name", SIDES)
def test_recomputed_blocks_of_both_stacks_keep_gradients(name: str) -> None:
    gradients, calls = [], []
    for technique in (None, Recompute()):
        model, seen = KINDS[name].model(), []
        for stack, blocks in KINDS[name].stacks.items():
            for index in range(blocks):
                last = model.get_submodule(f"{stack}.{index}.{KINDS[name].writers[stack][0]}")
                last.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        if technique:
            technique.model(model)
        KINDS[name].loss(model).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        calls.append(len(seen))
    blocks = sum(KINDS[name].stacks.values())
    assert calls == [blocks, 2 * blocks]
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain is recomputed is None or torch.equal(plain, recomputed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["our marian", "our t5"])
def test_compiled_blocks_of_both_stacks_keep_the_loss(name: str) -> None:
    torch._dynamo.reset()
    model = CompiledBlocks(backend="aot_eager").model(KINDS[name].model())
    compiled = [block for blocks in find_stacks(model).values() for block in blocks if block._compiled_call_impl]
    assert len(compiled) == sum(KINDS[name].stacks.values())
    torch.testing.assert_close(KINDS[name].loss(model), KINDS[name].loss(KINDS[name].model()))


def test_both_sides_grow() -> None:
    change = ProgressiveStacking(at=(2,)).changes(0, TrainState())
    assert change is not None
    shallow = change.restructure(KINDS["our t5"].model())  # 3 encoder and 2 decoder blocks
    assert {name: len(blocks) for name, blocks in find_stacks(shallow).items()} == {
        "encoder.blocks": 1,
        "decoder.blocks": 1,
    }
    state = TrainState(step=2, model=shallow)
    grown = ProgressiveStacking(at=(2,)).changes(2, state)
    assert grown is not None
    full = grown.restructure(KINDS["our t5"].model())
    origins = {grown.origin(name) for name, _ in full.named_parameters()}
    assert origins == {name for name, _ in shallow.named_parameters()}
    assert grown.origin("decoder.blocks.1.mlp.up.weight") == "decoder.blocks.0.mlp.up.weight"
    assert grown.origin("encoder.blocks.2.mlp.up.weight") == "encoder.blocks.0.mlp.up.weight"
    assert grown.origin("encoder.norm.weight") == "encoder.norm.weight"


def sequence(blocks: int) -> nn.Module:
    """Return a model that is itself the stack, whose name is therefore empty."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(blocks)))


def test_a_model_that_is_a_sequence_of_blocks_grows() -> None:
    first = ProgressiveStacking(at=(2,)).changes(0, TrainState())
    assert first is not None
    shallow = first.restructure(sequence(4))
    assert len(shallow) == 2
    grown = ProgressiveStacking(at=(2,)).changes(2, TrainState(step=2, model=shallow))
    assert grown is not None
    origins = {name: grown.origin(name) for name, _ in sequence(4).named_parameters()}
    assert origins["3.2.bias"] == "1.2.bias" and {*origins.values()} == {name for name, _ in shallow.named_parameters()}
    assert grown.adds("2.0.weight") and not grown.adds("1.0.weight")


def test_blocks_of_a_sequence_share_parameters_and_have_depths() -> None:
    shared = tied_names(ShareParameters().model(sequence(3)))
    assert shared["2.0.weight"] == "0.0.weight" and len(shared) == 8
    assert depths(sequence(3))["2.0.weight"] == (3, 3)
