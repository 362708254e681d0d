"""Growth in the middle of a run: every value where it belongs."""

import pytest
import torch
from torch import Tensor

from thrifty.core.compose import Composition, compose
from thrifty.core.state import TrainState, read_log
from thrifty.core.surgery import find_blocks
from thrifty.core.technique import Technique
from tiny_runs import advance, assert_same, losses, plain_run, restored, run_through, snapshot, technique


def grown(*others: Technique, **settings: object) -> tuple[Composition, TrainState, TrainState]:
    """A run of 4 blocks that starts with 2 and doubles before step 2: the run, a copy of its state just before the
    growth, and its state just after."""
    chosen = [technique("growth.stacking", at=(2,), **settings), *others]
    if not any("optimizer" in other.claims for other in others):
        chosen.append(technique("optimizers.adamw"))
    run = compose(plain_run(depth=4), chosen, 4)
    state = run.start()
    advance(run, state, 2)
    before = restored(run, snapshot(state))
    made = run.changes(state)
    assert [(entry.step, entry.technique) for entry in made] == [(2, "growth.stacking")]
    return run, before, state


def depth(state: TrainState) -> int:
    assert state.model is not None
    return len(find_blocks(state.model)[1])


def moved(name: str) -> str:
    return name.replace("blocks.2.", "blocks.0.").replace("blocks.3.", "blocks.1.")


def test_blocks_are_copied_on_top_of_themselves_in_order() -> None:
    _, before, after = grown()
    assert (depth(before), depth(after)) == (2, 4)
    old = before.tensors()
    for name, tensor in after.tensors().items():
        if name.startswith("parameters/"):
            assert torch.equal(tensor, old[moved(name)]), name


def test_moments_start_afresh_and_the_schedule_goes_on() -> None:
    _, _, after = grown()
    assert after.optimizer is not None
    assert all(not tensor.any() for name, tensor in after.tensors().items() if name.startswith("optimizer/"))
    assert (after.optimizer.updates, after.optimizer.born) == (2, 2)


def test_copied_moments_come_from_where_the_value_came_from() -> None:
    _, before, after = grown(moments="copy")
    assert after.optimizer is not None
    assert (after.optimizer.updates, after.optimizer.born) == (2, 0)
    for name, tensor in after.tensors().items():
        if name.startswith("optimizer/"):
            assert tensor.any() and torch.equal(tensor, before.tensors()[moved(name)]), name


@pytest.mark.parametrize("moments", ["reset", "copy"])
def test_masks_belong_to_the_weights_and_follow_them(moments: str) -> None:
    run, before, after = grown(technique("sparsity.rigl", every=100), moments=moments)
    masks = {name: tensor for name, tensor in after.tensors().items() if name.startswith("optimizer/mask/blocks")}
    for name, mask in masks.items():
        assert torch.equal(mask, before.tensors()[moved(name)]), name
        weight = after.tensors()[name.replace("optimizer/mask", "parameters")]
        if mask.numel():
            assert not weight[~mask].any()
    run.verify(after)


def test_the_log_alone_rebuilds_the_structure() -> None:
    run, _, after = grown()
    again = run.place(read_log(after.scalars()))
    assert depth(again) == 4
    assert {name: t.shape for name, t in again.tensors().items()} == {n: t.shape for n, t in after.tensors().items()}
    start = run.place(read_log(after.scalars())[:1])
    assert depth(start) == 2


def test_a_depth_that_does_not_halve_still_ends_at_full_depth() -> None:
    for full in (1, 3, 5):
        _, state = run_through(plain_run(depth=full), [technique("growth.stacking"), technique("optimizers.adamw")], 5)
        assert depth(state) == full


def test_growth_goes_on_learning_when_compiled() -> None:
    torch._dynamo.reset()
    chosen = [technique("growth.stacking", at=(10, 20)), technique("optimizers.adamw")]
    plain, _ = run_through(plain_run(repeated=True), chosen, 30)
    compiled, state = run_through(plain_run(repeated=True), [*chosen, technique("compile")], 30)
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-3)
    assert depth(state) == 4
    assert losses(compiled)[-1] < losses(compiled)[0] - 2


def test_a_buffer_follows_its_block() -> None:
    """Persistent buffers are values too."""

    def model() -> torch.nn.Module:
        made = plain_run(depth=4).build()
        for index, block in enumerate(find_blocks(made)[1]):
            block.register_buffer("seen", torch.tensor(float(index)))
        return made

    plain = plain_run()
    plain = type(plain)(model, plain.source, plain.objective)
    run = compose(plain, [technique("growth.stacking", at=(2,)), technique("optimizers.adamw")], 4)
    state = run.start()
    advance(run, state, 2)
    run.changes(state)
    seen: list[Tensor] = [state.tensors()[f"buffers/blocks.{index}.seen"] for index in range(4)]
    assert [int(value) for value in seen] == [0, 1, 0, 1]


def test_a_run_saved_exactly_before_a_growth_makes_it_when_resumed() -> None:
    chosen = [technique("growth.stacking", at=(2,)), technique("optimizers.adamw")]
    run = compose(plain_run(), chosen, 4)
    state = run.start()
    advance(run, state, 2)
    resumed = restored(run, snapshot(state))
    assert (resumed.step, depth(resumed)) == (2, 2)
    advance(run, resumed)
    advance(run, state)
    assert depth(resumed) == 4
    assert_same(snapshot(resumed), snapshot(state))
