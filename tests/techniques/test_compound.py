"""Compound growth: function-preserving width, causal pooling, and preserved optimizer state."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from pair_runs import pair_run
from stacked_models import KINDS
from tiny_runs import advance, losses, plain_run, restored, run_through, snapshot, technique, tiny_model
from torch import Tensor, nn

from thrifty.composition.compose import Run, compose
from thrifty.core.batches import Batch, BatchSource
from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.state import TrainState
from thrifty.core.technique import Technique
from thrifty.modeling.layer_shapes import in_width
from thrifty.modeling.module_surgery import find_blocks
from thrifty.modeling.residual_branches import find_branches
from thrifty.techniques.curriculum.sequence_length import SequenceLengthWarmup
from thrifty.techniques.growth._token_pooling import POOLED_IN, add_pooling, pool_targets, pool_tokens
from thrifty.techniques.growth._width_growth import (
    copied_units,
    divide_outputs,
    duplicate_units,
    inner_parameters,
    narrow_networks,
)
from thrifty.techniques.growth.compound import CompoundGrowth, divisor_at


def grown_in_width(style: str = "llama", *others: Technique, **changed: object) -> tuple[Run, TrainState, TrainState]:
    """Return a run that only grows in width before step 2, a copy of its state before, and its state after."""
    settings = {"at": (2,), "depth": 1, "length": 1, "width": 2} | changed
    chosen = [CompoundGrowth(**settings), *(others or [technique("optimizers.adamw")])]
    run = compose(plain_run(style=style), chosen, 4)
    state = run.start()
    advance(run, state, 2)
    before = restored(run, snapshot(state))
    run.changes(state)
    return run, before, state


def hidden(state: TrainState) -> int:
    assert state.model is not None
    return find_blocks(state.model)[1][0].mlp.down.in_features


@pytest.mark.parametrize("divisor", [2, 3])
@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_growth_in_width_preserves_the_function(style: str, divisor: int) -> None:
    run, before, after = grown_in_width(style, width=divisor)
    full = {"gpt": 64, "llama": 64}[style]
    assert (hidden(before), hidden(after)) == (full // 2, full)
    tokens = run.source.at(7)["tokens"][:, :-1]
    assert before.model is not None and after.model is not None
    with torch.no_grad():
        narrow_output, wide_output = before.model.eval()(tokens), after.model.eval()(tokens)
    assert (wide_output - narrow_output).abs().max() < 1e-6 * max(1.0, float(narrow_output.abs().max()))
    advance(run, after)


@torch.no_grad()
def widened(model: nn.Module, small: nn.Module) -> None:
    """Copy the weights of a model with narrower feed-forward networks into a wider model."""
    own, inner = dict(small.named_parameters()), inner_parameters(small)
    for name, parameter in model.named_parameters():
        value = own[name]
        if value.shape != parameter.shape:
            units = next(
                each for (stack, path), each in inner.items() if name.startswith(stack) and name.endswith(f".{path}")
            )
            dim = next(d for d in range(value.ndim) if value.shape[d] != parameter.shape[d])
            value = duplicate_units(value, dim, parameter.shape[dim], units.parts)
            if units.writes:
                value = divide_outputs(value, dim, units.units, 0.3, name)
        parameter.copy_(value)


def inner_widths(model: nn.Module) -> list[int]:
    blocks = (block for stack in find_branches(model).values() for block in stack)
    return [in_width(branch.last) for block in blocks for branch in block if branch.kind == "mlp"]


@pytest.mark.parametrize("kind", ["gpt2", "our t5", "llama", "torch's encoder", "vit", "phi3"])
@pytest.mark.parametrize("divisor", [2, 3])
def test_any_known_model_can_be_narrowed_and_widened(kind: str, divisor: int) -> None:
    small, full = KINDS[kind].model(), KINDS[kind].model()
    narrow_networks(small, divisor)
    assert inner_widths(small) == [units // divisor for units in inner_widths(full)] != []
    widened(full, small)
    torch.testing.assert_close(KINDS[kind].loss(full), KINDS[kind].loss(small), rtol=1e-5, atol=1e-6)


@settings(max_examples=40)
@given(some.integers(1, 9), some.integers(0, 12), some.floats(0, 2))
def test_weights_of_copies_sum_to_the_origin(old: int, more: int, spread: float) -> None:
    value = torch.randn(3, old, dtype=torch.float64)
    new = old + more
    shares = divide_outputs(duplicate_units(value, 1, new), 1, old, spread, "key")
    total = torch.zeros_like(value)
    for unit, origin in enumerate(copied_units(old, new).tolist()):
        total[:, origin] += shares[:, unit]
    torch.testing.assert_close(total, value)


def test_gate_and_value_are_each_duplicated() -> None:
    rows = torch.arange(6.0)[:, None]
    assert duplicate_units(rows, 0, 12, parts=2).flatten().tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]


def copy_distance(spread: float) -> float:
    """Return the distance between copies of units after some steps of training."""
    run, _, state = grown_in_width("gpt", spread=spread)
    advance(run, state)
    assert state.model is not None
    up = find_blocks(state.model)[1][0].mlp.up.weight.detach()
    return float((up[: len(up) // 2] - up[len(up) // 2 :]).abs().max())


def test_noise_separates_copies_with_equal_weights() -> None:
    assert copy_distance(0.0) < 1e-7
    assert copy_distance(0.1) > 1e-4


def test_moments_follow_their_units_undivided() -> None:
    _, before, after = grown_in_width("gpt", moments="copy")
    assert after.optimizer is not None and (after.optimizer.updates, after.optimizer.born) == (2, 0)
    old, new = before.tensors(), after.tensors()
    for slot in ("mean", "square"):
        for layer, dim in (("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
            name = next(n for n in new if n.endswith(f"{slot}/blocks.1.mlp.{layer}"))
            assert torch.equal(new[name], torch.cat([old[name], old[name]], dim)), name


@pytest.mark.parametrize("average", ["averaging.ema"])
def test_a_weight_average_grows_like_the_weights(average: str) -> None:
    chosen = [technique(average, start=0), technique("optimizers.adamw")]
    run, before, after = grown_in_width("gpt", *chosen, moments="copy", spread=0.0)
    tokens = run.source.at(7)["tokens"][:, :-1]
    with torch.no_grad():
        outputs = []
        for state in (before, after):
            assert state.model is not None and state.optimizer is not None
            with state.optimizer.use_eval_weights():
                outputs.append(state.model.eval()(tokens))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["adafactor", "lamb", "lion", "muon", "schedule_free", "sgd"])
def test_optimizers_continue_with_their_state(name: str) -> None:
    run, _, state = grown_in_width("gpt", technique(f"optimizers.{name}"), moments="copy")
    assert all(record.loss < 10 for record in advance(run, state))


def test_state_without_a_dim_of_units_is_refused() -> None:
    with pytest.raises(RefusedError, match="inner units, so it cannot grow") as refused:
        grown_in_width("gpt", technique("optimizers.soap"), moments="copy")
    assert 'moments="reset"' in refused.value.fix
    run, _, state = grown_in_width("gpt", technique("optimizers.soap"))
    advance(run, state)


def test_masks_and_adapters_are_refused() -> None:
    for other, reason in (("sparsity.rigl", "the density of a mask depends"), ("adapters.lora", "keep frozen")):
        with pytest.raises(UsageError, match=reason):
            compose(plain_run(), [CompoundGrowth(), technique(other), technique("optimizers.adamw")], 4)


def test_sizes_double_up_to_the_last_growth() -> None:
    assert [divisor_at(step, 4, (2, 5)) for step in range(7)] == [4, 4, 2, 2, 2, 1, 1]
    assert [divisor_at(step, 2, (2, 5)) for step in range(7)] == [2, 2, 2, 2, 2, 1, 1]
    assert [divisor_at(step, 8, (2, 5)) for step in range(7)] == [4, 4, 2, 2, 2, 1, 1]
    assert [divisor_at(step, 1, (2, 5)) for step in range(7)] == [1] * 7


def test_all_three_sizes_grow_to_the_full_size() -> None:
    run = compose(
        plain_run(), [CompoundGrowth(at=(1, 3), depth=4, width=4, length=4), technique("optimizers.adamw")], 5
    )
    state, actual = run.start(), []
    for step in range(5):
        advance(run, state, step + 1)
        assert state.model is not None
        blocks = find_blocks(state.model)[1]
        actual.append((len(blocks), blocks[0].mlp.down.in_features, run.source.at(step)["tokens"].shape[1] - 1))
    assert actual == [(1, 16, 4), (2, 32, 8), (2, 32, 8), (4, 64, 16), (4, 64, 16)]


@settings(max_examples=20)
@given(some.integers(1, 20), some.integers(1, 5))
def test_pooling_averages_neighbors_and_predicts_the_next(length: int, group: int) -> None:
    x, tokens = torch.randn(2, length, 3), torch.arange(length + 1).expand(2, -1)
    means, targets = pool_tokens(x, group), pool_targets(tokens, group)[:, 1:]
    assert means.shape[1] == targets.shape[1] == length // group
    for place in range(length // group):
        neighbours = range(place * group, (place + 1) * group)
        torch.testing.assert_close(means[:, place], sum(x[:, n] for n in neighbours) / group)
        assert int(targets[0, place]) == max(neighbours) + 1


def test_no_token_is_predicted_from_itself() -> None:
    model = tiny_model().train()
    add_pooling(model, 2)
    tokens = plain_run().source.at(0)["tokens"][:, :-1]
    changed = tokens.clone()
    changed[:, 6] += 1  # the target of the third group, and the first of the fourth
    with torch.no_grad():
        one, other = model(tokens), model(changed)
    assert one.shape[1] == 8
    assert torch.equal(one[:, :3], other[:, :3]) and not torch.equal(one[:, 3], other[:, 3])


def test_a_pooling_model_learns_and_evaluates_without_pooling() -> None:
    plain = plain_run(repeated=True)
    chosen = [CompoundGrowth(at=(15, 30), shorten="pool", depth=1, width=1), technique("optimizers.adamw")]
    records, state = run_through(plain, chosen, 40)
    actual = losses(records)
    assert actual[14] < actual[0] - 0.3 and actual[-1] < actual[0] - 1
    assert state.model is not None and POOLED_IN.get(state.model) is None
    add_pooling(state.model, 2)
    tokens = plain.source.at(0)["tokens"][:, :-1]
    with torch.no_grad():
        assert state.model.eval()(tokens).shape[1] == tokens.shape[1]
        assert state.model.train()(tokens).shape[1] == tokens.shape[1] // 2


def test_inputs_that_cannot_be_shortened_are_refused() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x + self.down(self.up(x)) * mask

    model = nn.Module()
    model.blocks = nn.ModuleList([Masked(), Masked()])
    add_pooling(model, 2)
    with pytest.raises(RefusedError, match="a mask or positions"):
        model.blocks[0](torch.zeros(1, 4, 4), torch.ones(1, 4, 4))
    with pytest.raises(RefusedError, match="pooling supports one stack"):
        add_pooling(KINDS["our t5"].model(), 2)


def test_an_encoder_decoder_grows_wider_on_both_sides() -> None:
    model = KINDS["our t5"].model()
    assert {path for _, path in inner_parameters(model)} == {"mlp.up.weight", "mlp.down.weight"}
    narrow_networks(model, 2)
    assert KINDS["our t5"].loss(model).isfinite()


def test_towers_of_unequal_inner_widths_grow_wider() -> None:
    chosen = [CompoundGrowth(at=(2,), depth=1, length=1), technique("optimizers.adamw")]
    run = compose(pair_run(text_hidden=48), chosen, 3)
    state = run.start()
    advance(run, state, 2)
    assert state.model is not None and sorted({*inner_widths(state.model)}) == [24, 32]
    advance(run, state)
    assert sorted({*inner_widths(state.model)}) == [48, 64]


class RepeatedBatch(BatchSource):
    def __init__(self, whole: Batch):
        self.whole, self.batch = whole, len(whole.weight)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        return self.whole.rows(start, stop)


def test_texts_of_the_user_with_masks_and_labels_grow_in_length() -> None:
    fields = {name: torch.ones(4, 12, dtype=torch.int64) for name in ("input_ids", "attention_mask", "labels")}
    whole = Batch({**fields, "score": torch.zeros(4)}, torch.ones(4))
    source = CompoundGrowth(at=(1, 2), length=4).batches(RepeatedBatch(whole))
    assert [source.at(step)["labels"].shape for step in range(3)] == [(4, 3), (4, 6), (4, 12)]
    assert source.at(0)["score"].shape == (4,)


@pytest.mark.parametrize(
    ("technique", "setting"),
    [
        (CompoundGrowth(at=(1, 2), length=4), "length=1"),
        (SequenceLengthWarmup(start=4, until=3, multiple=4), "start=8"),
    ],
)
def test_texts_that_would_lose_all_labels_are_refused(technique: Technique, setting: str) -> None:
    tokens, labels = torch.ones(2, 4, 16, dtype=torch.int64)
    labels[:3, :6] = labels[3] = -100  # prompts of 6 tokens, and a text without labels
    source = RepeatedBatch(Batch({"input_ids": tokens, "labels": labels}, torch.ones(4)))
    with pytest.raises(RefusedError, match="the first 4 tokens of all 4 texts have no label") as refused:
        technique.batches(source).at(0)
    assert setting in refused.value.fix
    longer = SequenceLengthWarmup(start=8, until=3, multiple=4).batches(source).at(0)
    assert longer["labels"].shape == (4, 8)
    labels[2, 3] = 1  # random labels may leave a text, and a micro-batch, without one
    for part in (technique.batches(source).at(0), technique.batches(source).rows(0, 0, 1)):
        assert part["labels"].shape[1] == 4


def test_images_are_refused_with_the_setting_that_keeps_them() -> None:
    images = Batch({"pixel_values": torch.zeros(4, 3, 8, 8), "labels": torch.zeros(4)}, torch.ones(4))
    source = CompoundGrowth(at=(1, 2), length=4).batches(RepeatedBatch(images))
    with pytest.raises(RefusedError, match="pixel_values") as refused:
        source.at(0)
    assert "length" in refused.value.fix.partition(";")[0]
