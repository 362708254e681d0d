"""Growth during a run: every value reaches its new name and shape."""

import pytest
import torch
from tiny_runs import (
    advance,
    assert_same,
    evaluated_loss,
    losses,
    plain_run,
    restored,
    run_through,
    snapshot,
    technique,
)
from torch import Tensor

from thrifty import techniques
from thrifty.composition.compose import Run, compose
from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.state import TrainState, read_log
from thrifty.core.structural_change import StructuralChange
from thrifty.core.technique import Technique
from thrifty.modeling.module_surgery import find_blocks
from thrifty.optim.moment_formats import opened
from thrifty.optim.transform_elements import ScaleByAdam
from thrifty.optim.weight_masks import SLOT


def grown(*others: Technique, **settings: object) -> tuple[Run, TrainState, TrainState]:
    """Return a run that grows from 2 to 4 blocks before step 2, a copy of the state before growth, and the state after
    growth.
    """
    chosen = [technique("growth.stacking", at=(2,), **settings), *others]
    if not any(Claim.OPTIMIZER in other.claims for other in others):
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


def test_blocks_are_copied_on_top_in_order() -> None:
    _, before, after = grown()
    assert (depth(before), depth(after)) == (2, 4)
    old = before.tensors()
    for name, tensor in after.tensors().items():
        if name.startswith("parameters/"):
            assert torch.equal(tensor, old[moved(name)]), name


def test_moments_reset_but_the_schedule_continues() -> None:
    _, _, after = grown()
    assert after.optimizer is not None
    assert all(not tensor.any() for name, tensor in after.tensors().items() if name.startswith("optimizer/"))
    assert (after.optimizer.updates, after.optimizer.born) == (2, 2)


def test_copied_moments_come_from_the_origin_of_the_value() -> None:
    _, before, after = grown(moments="copy")
    assert after.optimizer is not None
    assert (after.optimizer.updates, after.optimizer.born) == (2, 0)
    for name, tensor in after.tensors().items():
        if name.startswith("optimizer/"):
            assert tensor.any() and torch.equal(tensor, before.tensors()[moved(name)]), name


@pytest.mark.parametrize("moments", ["reset", "copy"])
def test_masks_follow_their_weights(moments: str) -> None:
    run, before, after = grown(technique("sparsity.rigl", every=100), moments=moments)
    masks = {name: tensor for name, tensor in after.tensors().items() if name.startswith(f"optimizer/{SLOT}/blocks")}
    assert masks
    for name, mask in masks.items():
        assert torch.equal(mask, before.tensors()[moved(name)]), name
        weight = after.tensors()[name.replace(f"optimizer/{SLOT}", "parameters")]
        if mask.numel():
            assert not weight[~mask].any()
    run.verify(after)


def test_log_alone_rebuilds_the_structure() -> None:
    run, _, after = grown()
    again = run.init_state(read_log(after.scalars()))
    assert depth(again) == 4
    assert {name: t.shape for name, t in again.tensors().items()} == {n: t.shape for n, t in after.tensors().items()}
    start = run.init_state(read_log(after.scalars())[:1])
    assert depth(start) == 2


def test_odd_depth_still_grows_to_full_depth() -> None:
    for full in (3, 5):
        _, state = run_through(plain_run(depth=full), [technique("growth.stacking"), technique("optimizers.adamw")], 5)
        assert depth(state) == full


@pytest.mark.parametrize("name", ["growth.stacking", "growth.compound"])
def test_a_model_of_one_block_cannot_grow_in_depth(name: str) -> None:
    with pytest.raises(RefusedError, match=r"no stack has several blocks \(blocks\)"):
        compose(plain_run(depth=1), [technique(name), technique("optimizers.adamw")], 5).start()


def test_compiled_model_learns_after_growth() -> None:
    torch._dynamo.reset()
    chosen = [technique("growth.stacking", at=(10, 20)), technique("optimizers.adamw")]
    plain, _ = run_through(plain_run(repeated=True), chosen, 30)
    compiled, state = run_through(plain_run(repeated=True), [*chosen, technique("compile")], 30)
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-3)
    assert depth(state) == 4
    assert losses(compiled)[-1] < losses(compiled)[0] - 2


def test_buffer_follows_its_block() -> None:
    """Persistent buffers are transferred too."""

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


def test_run_saved_before_growth_grows_when_resumed() -> None:
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


@pytest.mark.parametrize("order", ["ABCABC", "AABBCC"])
def test_copies_have_the_configured_order(order: str) -> None:
    _, before, after = grown(order=order)
    old = before.tensors()
    for block, origin in enumerate([0, 1, 0, 1] if order == "ABCABC" else [0, 0, 1, 1]):
        for name, tensor in after.tensors().items():
            if name.startswith(f"parameters/blocks.{block}."):
                assert torch.equal(tensor, old[name.replace(f"blocks.{block}.", f"blocks.{origin}.")]), name


@pytest.mark.parametrize("style", ["gpt", "llama"])
@pytest.mark.parametrize("order", ["ABCABC", "AABBCC"])
def test_zeroed_copies_keep_the_function(order: str, style: str) -> None:
    chosen = [technique("growth.stacking", at=(2,), order=order, start="zeroed"), technique("optimizers.adamw")]
    run = compose(plain_run(depth=5, style=style), chosen, 4)
    state = run.start()
    advance(run, state, 2)
    tokens = run.source.at(7)["tokens"][:, :-1]
    assert state.model is not None
    with torch.no_grad():
        before, shallow = state.model.eval()(tokens), depth(state)
        run.changes(state)
        after = state.model.eval()(tokens)
    assert (shallow, depth(state)) == (2, 5)
    assert (after - before).abs().max() < 1e-6 < before.abs().max()
    advance(run, state)
    silent = [name for name, p in state.model.named_parameters() if not p.any()]
    assert not silent, "copies that start from zeros train like other blocks"


@pytest.mark.parametrize("name", ["fixup", "layer_scale", "rezero", "skip_init"])
def test_zeroed_copies_with_gains_keep_the_function_and_train(name: str) -> None:
    chosen = [technique("growth.stacking", at=(2,), start="zeroed"), technique(f"initializations.{name}")]
    run = compose(plain_run(style="gpt"), [*chosen, technique("optimizers.adamw")], 4)
    state = run.start()
    advance(run, state, 2)
    tokens = run.source.at(7)["tokens"][:, :-1]
    assert state.model is not None
    with torch.no_grad():
        before = state.model.eval()(tokens)
        run.changes(state)
        assert (state.model.eval()(tokens) - before).abs().max() < 1e-6 * before.abs().max()
    run.backward(state.model.train(), run.objective, run.source.at(2))
    for block in find_blocks(state.model)[1]:
        assert block.attention.out.weight.grad.any() and block.mlp.down.weight.grad.any()


@pytest.mark.parametrize("others", [[], [("precision.optimizer_state", {"min_elements": 1})]])
@pytest.mark.parametrize(
    ("growth", "settings"),
    [
        ("growth.stacking", {"at": (4,), "start": "zeroed"}),
        ("growth.stacking", {"at": (4,), "start": "zeroed", "order": "AABBCC"}),
        ("growth.compound", {"at": (4,), "depth": 1, "width": 2, "length": 1}),
    ],
)
@pytest.mark.parametrize("moments", ["copy", "mean"])
def test_function_preserving_growth_preserves_averaged_weights(
    growth: str, settings: dict, moments: str, others: list
) -> None:
    chosen = [(growth, {"moments": moments, **settings}), ("optimizers.schedule_free", {"lr": 0.05}), *others]
    run = compose(plain_run(depth=4), [technique(name, **own) for name, own in chosen], 8)
    state = run.start()
    advance(run, state, 4)
    before = evaluated_loss(run, state)
    assert run.changes(state)
    assert evaluated_loss(run, state) == pytest.approx(before, abs=1e-5)


def test_post_norm_model_refuses_zeroed_blocks() -> None:
    chosen = [technique("growth.stacking", start="zeroed"), technique("optimizers.adamw")]
    with pytest.raises(RefusedError, match="norm after its sums"):
        compose(plain_run(style="gpt1"), chosen, 4).start()
    with pytest.raises(UsageError, match="would never contribute"):
        compose(plain_run(), [*chosen, technique("adapters.lora")], 4)


def first_update(age: int, square: Tensor) -> Tensor:
    """Return Adam's update for a gradient of 1, a first moment of 0 and this second moment."""
    adam = ScaleByAdam(0.9, 0.999)
    slots = {"mean": [torch.zeros_like(square)], "square": [square.clone()]}
    return adam.update([torch.ones_like(square)], slots, [torch.zeros_like(square)], adam.scalars(age, age))[0]


def test_first_update_after_growth_has_normal_size() -> None:
    zeros, ones = torch.zeros(3), torch.ones(3)
    naive = first_update(10_000, zeros)
    assert naive.mean() == pytest.approx((1 - 0.9) / (1 - 0.999) ** 0.5, rel=1e-3)
    assert naive.mean() == pytest.approx(3.16, abs=0.01)
    assert first_update(0, zeros).mean() == pytest.approx(1.0)  # the age is reset too
    assert first_update(10_000, ones).mean() == pytest.approx(0.1, rel=1e-2)  # from the mean of the layer


def test_second_moments_of_copies_start_from_the_layer_mean() -> None:
    _, before, after = grown(moments="mean")
    assert after.optimizer is not None
    assert (after.optimizer.updates, after.optimizer.born) == (2, 0)
    old, seen = before.tensors(), 0
    for name, tensor in after.tensors().items():
        kind, _, rest = name.partition("/")
        origin = old[moved(name)]
        if kind != "optimizer":
            continue
        is_copy = any(f"blocks.{block}." in rest for block in (2, 3))
        if is_copy and ".square/" in name:
            seen += 1
            torch.testing.assert_close(tensor, torch.full_like(tensor, float(origin[origin > 0].mean())))
        else:
            assert torch.equal(tensor, origin), name
    assert seen > 8


def test_masked_second_moments_start_from_the_layer_mean() -> None:
    run, before, after = grown(technique("sparsity.rigl", every=100), moments="mean")
    name = next(name for name in after.tensors() if name.endswith("square/blocks.2.mlp.up.weight"))
    weight = after.tensors()["parameters/blocks.2.mlp.up.weight"]
    moments_after = after.tensors()[name]
    assert not moments_after[weight == 0].any()
    old = before.tensors()[moved(name)]
    torch.testing.assert_close(moments_after[weight != 0].unique(), old[old > 0].mean()[None])
    run.verify(after)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("moments", ["copy", "mean"])
@pytest.mark.parametrize("name", [name for name in techniques.names() if name.startswith("optimizers.")])
def test_every_optimizer_keeps_state_of_old_parameters(name: str, moments: str) -> None:
    _, before, after = grown(technique(name), moments=moments)
    assert before.tensors().keys() < after.tensors().keys()
    old = before.tensors()
    for key, tensor in after.tensors().items():
        assert torch.isfinite(tensor).all()
        if key in old:  # old parameters keep their state
            assert torch.equal(tensor, old[key]), key


AVERAGE_SLOTS = {"averaging.ema": "exponential_average", "averaging.latest": "latest_weight_average"}
"""Name, in checkpoints, of the element that stores an average."""


@pytest.mark.parametrize("average", AVERAGE_SLOTS)
def test_weight_average_is_copied_not_averaged(average: str) -> None:
    _, before, after = grown(technique(average, start=0), technique("optimizers.adamw"), moments="mean")
    averages = [name for name in after.tensors() if AVERAGE_SLOTS[average] in name]
    assert averages
    for name in averages:
        assert torch.equal(after.tensors()[name], before.tensors()[moved(name)]), name


@pytest.mark.parametrize("moments", ["copy", "mean"])
def test_eight_bit_moments_grow_like_float32_moments(moments: str) -> None:
    _, before, after = grown(technique("precision.optimizer_state", min_elements=1), moments=moments)
    old, new = before.tensors(), after.tensors()
    quantized = [name for name, tensor in new.items() if tensor.dtype == torch.uint8]
    assert quantized and before.optimizer is not None and after.optimizer is not None
    for name in quantized:
        value = opened(name, new, after.optimizer.site.slot_kind)
        was = opened(moved(name), old, before.optimizer.site.slot_kind)
        if moments == "mean" and name not in old and "square" in name:
            torch.testing.assert_close(value, torch.full_like(value, float(was[was > 0].mean())))
        else:
            assert torch.equal(value, was) and torch.equal(new[name], old[moved(name)]), name


def test_changed_shape_without_resize_is_refused() -> None:
    change = StructuralChange("wider")
    with pytest.raises(IntegrityError, match="must have shape"):
        change.resize("weight", torch.zeros(2), torch.Size([3]))
