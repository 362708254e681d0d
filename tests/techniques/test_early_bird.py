"""Early-bird tickets: masks against plain loops, the step of the draw, and the run of the smaller model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from tiny_runs import (
    advance,
    assert_same,
    losses,
    plain_run,
    restored,
    run_through,
    snapshot,
    technique,
    tiny_model,
    with_optimizer,
)
from torch import Tensor, nn

from thrifty.composition.compose import Run, compose
from thrifty.core.errors import IntegrityError, RefusedError, UsageError
from thrifty.core.state import TrainState, read_log
from thrifty.core.structural_change import StructuralChange
from thrifty.modeling.structured_pruning import coefficients_of, find_units
from thrifty.techniques.sparsity.early_bird import EarlyBird, as_hex, from_hex, kept_of_all, kept_of_each, mask_distance
from thrifty.training import checkpoint

SCORES = some.lists(
    some.lists(some.integers(0, 9).map(float), min_size=1, max_size=6), min_size=1, max_size=4
).map(lambda rows: {f"layer {index}": torch.tensor(row) for index, row in enumerate(rows)})  # fmt: skip


def run_of(steps: int = 8, style: str = "gpt", others: tuple[str, ...] = (), **changed: object) -> Run:
    bird = technique("sparsity.early_bird", **changed)
    return compose(plain_run(style=style), with_optimizer([bird, *map(technique, others)]), steps)


def kept_in(state: TrainState) -> dict[str, int]:
    assert state.model is not None
    return {name: pieces.count for name, pieces in find_units(state.model).items()}


# masks


@given(SCORES, some.floats(0, 0.95))
def test_layerwise_masks_keep_the_largest_and_at_least_one(scores: dict[str, Tensor], removed: float) -> None:
    for name, mask in kept_of_each(scores, removed).items():
        values = scores[name].tolist()
        count = max(len(values) - round(removed * len(values)), 1)
        best = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
        assert set(mask.nonzero().flatten().tolist()) == set(best)


@given(SCORES, some.floats(0, 0.95))
def test_global_mask_keeps_the_best_of_each_layer(scores: dict[str, Tensor], removed: float) -> None:
    masks = kept_of_all(scores, removed)
    places = [(name, i) for name in sorted(scores) for i in range(len(scores[name]))]
    count = max(len(places) - round(removed * len(places)), len(scores))
    best = {name: max(range(len(values)), key=lambda i: (values[i], -i)) for name, values in scores.items()}
    order = sorted(places, key=lambda at: (at[1] != best[at[0]], -float(scores[at[0]][at[1]]), at))
    assert {at for at in places if masks[at[0]][at[1]]} == set(order[:count])


@given(some.lists(some.booleans(), min_size=1, max_size=70))
def test_mask_survives_hexadecimal_text(bits: list[bool]) -> None:
    text = as_hex(torch.tensor(bits))
    assert from_hex(text, len(bits)) == [place for place, bit in enumerate(bits) if bit]
    assert len(text) == -(-len(bits) // 4)


@given(some.integers(1, 5), some.integers(1, 20), some.integers(0, 1000))
@settings(max_examples=40)
def test_mask_distance_is_the_largest_differing_fraction(masks: int, places: int, seed: int) -> None:
    rows = torch.rand(masks, places, generator=torch.Generator().manual_seed(seed)) < 0.5
    shares = [sum(a != b for a, b in zip(rows[0], row, strict=True)) / places for row in rows[1:]]
    assert mask_distance(rows) == pytest.approx(float(max(shares, default=0.0)))


def test_masks_use_magnitudes() -> None:
    run = run_of()
    state = run.start()
    assert state.model is not None
    bird = next(each for each in run.techniques if isinstance(each, EarlyBird))
    with torch.no_grad():
        for coefficients in coefficients_of(state.model).values():
            coefficients.fill_(0.5)
            coefficients[1] = -2.0
            coefficients[2] = 0.01
    masks = bird.masks(state.model)
    assert all(mask[1] for mask in masks.values())
    assert not any(masks[name][2] for name in masks if name.endswith("out"))


# drawing a ticket


def test_coefficients_have_l1_penalty_without_decay() -> None:
    """The update equals an optimizer step by autograd on the loss plus penalty · |c|."""
    run = compose(plain_run(), [technique("sparsity.early_bird", penalty=0.5), technique("optimizers.sgd")], 4)
    state, batch = run.start(), run.source.at(0)
    assert state.model is not None and state.optimizer is not None
    run.backward(state.model, run.objective, batch)
    gradients = {name: c.grad.clone() for name, c in coefficients_of(state.model).items()}
    before = {name: c.detach().clone() for name, c in coefficients_of(state.model).items()}
    rate = state.optimizer.learning_rate()
    state.optimizer.step()
    for name, c in coefficients_of(state.model).items():
        torch.testing.assert_close(c.detach(), before[name] - rate * (gradients[name] + 0.5 * before[name].sign()))


def test_ticket_is_drawn_when_masks_agree() -> None:
    run = run_of(20, every=2, queue=3, distance=0.2, latest=20)
    state = run.start()
    records = advance(run, state)
    curve = [(record.step - 1, record.notes) for record in records if "mask_distance_of_heads" in record.notes]
    assert [step for step, _ in curve] == list(range(4, curve[-1][0] + 1, 2))  # two masks exist after step 4
    drawn = next(entry for entry in state.log if entry.decision["phase"] == "train")
    near = [max(notes.values()) < 0.2 for step, notes in curve]
    first = next(step for (step, _), is_near in zip(curve, near, strict=True) if is_near and step >= 6)
    assert drawn.step == first + 1 and "the masks agree" in drawn.reason


def test_ticket_is_drawn_at_the_latest_step() -> None:
    for draw, distance in (("coefficients", 0.0), ("late", 1.0), ("random", 0.0)):
        bird = technique("sparsity.early_bird", latest=3, distance=distance, criterion=draw)
        _, state = run_through(plain_run(), [bird, technique("optimizers.adamw")], 5)
        assert [(entry.step, entry.decision["phase"]) for entry in state.log] == [(0, "search"), (3, "train")]
        assert "latest" in state.log[-1].reason


# the smaller model


@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_run_continues_as_smaller_model_from_initial_weights(style: str) -> None:
    run = run_of(6, style, latest=3)
    state = run.start()
    advance(run, state, 3)
    changes = run.changes(state)
    assert [change.step for change in changes] == [3]
    assert state.model is not None and state.optimizer is not None
    kept = changes[0].decision["kept"]
    whole = tiny_model(style=style)
    for name, pieces in find_units(whole).items():
        places = kept[name] if pieces.kind == "heads" else from_hex(kept[name], pieces.count)
        columns = [place * pieces.width + i for place in places for i in range(pieces.width)]
        now = state.model.get_submodule(name)
        assert torch.equal(now.weight, pieces.writer.weight[:, columns])
    heads = [pieces for pieces in find_units(whole).values() if pieces.kind == "heads"]
    assert all(kept_in(state)[each.name] == each.count - round(each.count / 3) for each in heads)
    neurons = [pieces for pieces in find_units(whole).values() if pieces.kind == "neurons"]
    total = sum(each.count for each in neurons)
    assert sum(kept_in(state)[each.name] for each in neurons) == total - round(0.4 * total)
    assert not any(tensor.any() for slot, tensors in state.optimizer.slots.items() for tensor in tensors)
    assert state.optimizer.born == state.optimizer.updates == 3
    assert not coefficients_of(state.model)


def test_ticket_run_equals_run_of_smaller_model() -> None:
    """The reference trains on the same batches, from the same weights, with an optimizer of the same age."""
    run = run_of(6, latest=2)
    state = run.start()
    advance(run, state, 2)
    run.changes(state)
    assert state.model is not None
    plain = replace(run.plain, build=lambda: _copied(state.model))
    alone = compose(plain, with_optimizer([]), 6)
    other = alone.start()
    assert other.optimizer is not None
    other.step, other.optimizer.updates, other.optimizer.born = 2, 2, 2
    assert losses(advance(alone, other)) == losses(advance(run, state))


def _copied(model: nn.Module | None) -> nn.Module:
    from copy import deepcopy

    assert model is not None
    return deepcopy(model)


@pytest.mark.parametrize("saved", [1, 2, 3, 4])
def test_resume_is_exact_in_every_phase(saved: int, tmp_path: Path) -> None:
    run = run_of(6, latest=3, queue=2, distance=0.0)
    straight = run.start()
    advance(run, straight)
    run = run_of(6, latest=3, queue=2, distance=0.0)
    state = run.start()
    advance(run, state, saved)
    checkpoint.save(tmp_path, state.step, state.tensors(), state.scalars())
    found = checkpoint.find(tmp_path)
    again = run_of(6, latest=3, queue=2, distance=0.0)
    resumed = again.init_state(read_log(found.scalars))
    checkpoint.fill(found, resumed.tensors())
    resumed.load_scalars(found.scalars)
    again.verify(resumed)
    advance(again, resumed)
    assert_same(snapshot(resumed), snapshot(straight))


def test_decision_is_replayed_from_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(6)
    state = run.start()
    advance(run, state, 4)
    saved = snapshot(state)

    def never(*_: object) -> StructuralChange:
        raise AssertionError("decided anew")

    monkeypatch.setattr(EarlyBird, "_draw_ticket", never)
    monkeypatch.setattr(EarlyBird, "masks", never)
    resumed = restored(run_of(6), saved)
    assert kept_in(resumed) == kept_in(state)


def test_random_ticket_keeps_equal_counts() -> None:
    kept = {}
    for draw, seed in (("coefficients", 0), ("random", 0), ("random", 1), ("random", 1)):
        run = run_of(4, criterion=draw, seed=seed)
        state = run.start()
        advance(run, state, 3)
        kept.setdefault((draw, seed), []).append((kept_in(state), state.log[-1].decision["kept"]))
    (counts, drawn), (other_counts, other) = kept["coefficients", 0][0], kept["random", 0][0]
    assert counts == other_counts and drawn != other
    assert kept["random", 1][0] == kept["random", 1][1]
    assert kept["random", 1][0][1] != other


@pytest.mark.parametrize("optimizer", ["optimizers.adamw", "optimizers.sgd", "optimizers.lion", "optimizers.muon"])
def test_sizes_are_correct_with_every_optimizer(optimizer: str) -> None:
    run = compose(plain_run(), [technique("sparsity.early_bird"), technique(optimizer)], 4)
    state = run.start()
    for step in range(1, 5):
        advance(run, state, step)
        run.verify(state)
    assert {count for name, count in kept_in(state).items() if name.endswith("out")} == {1}  # of two groups


def test_layerwise_neurons_are_equal_per_block() -> None:
    run = run_of(4, spread="layerwise")
    state = run.start()
    advance(run, state, 3)
    assert {count for name, count in kept_in(state).items() if name.endswith("down")} == {64 - round(0.4 * 64)}


def test_wrong_size_raises_integrity_error() -> None:
    run = run_of(6)
    state = run.start()
    advance(run, state, 3)
    state.model = run.build_model(state.log[:1])
    with pytest.raises(IntegrityError, match=r"sparsity.early_bird: blocks\.0"):
        run.verify(state)


@pytest.mark.parametrize("other", ["sparsity.rigl", "growth.stacking", "adapters.lora"])
def test_conflicting_techniques_are_refused(other: str) -> None:
    with pytest.raises(UsageError, match="cannot be combined"):
        run_of(4, others=(other,))


@pytest.mark.parametrize(("heads", "neurons"), [(0.0, 0.4), (0.5, 0.0)])
def test_one_kind_alone_is_removed(heads: float, neurons: float) -> None:
    run = run_of(heads=heads, neurons=neurons, every=1, queue=2, latest=3, distance=1.0)
    state = run.start()
    before = kept_in(state)
    advance(run, state)
    run.verify(state)
    changed = {name for name, count in kept_in(state).items() if count < before[name]}
    assert changed == {name for name, each in find_units(state.model, {"heads" if heads else "neurons"}).items()}


def test_the_fix_selects_the_kind_that_can_be_removed() -> None:
    with pytest.raises(RefusedError, match="for each head") as refused:
        EarlyBird().model(plain_run(style="t5").build())
    assert refused.value.fix.startswith("--set techniques.sparsity.early_bird.heads=0, which removes neurons only")
    EarlyBird(heads=0.0).model(plain_run(style="t5").build())


def test_removing_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="neither heads nor neurons"):
        EarlyBird(heads=0.0, neurons=0.0)
