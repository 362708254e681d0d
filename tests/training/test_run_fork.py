"""A fork copies matching state; the rest starts fresh or is left out, and is counted."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_runs import advance, plain_run, technique, with_optimizer

from thrifty.composition.compose import Run, compose
from thrifty.core.errors import UsageError
from thrifty.core.state import TrainState
from thrifty.core.technique import Technique
from thrifty.training import checkpoint
from thrifty.training.run_fork import copy_matching_state

STEPS = 12
Choice = Sequence[tuple[str, dict]]


def run_of(*chosen: Technique) -> Run:
    return compose(plain_run(), with_optimizer(chosen), STEPS)


def trained(folder: Path, run: Run, steps: int = 6) -> TrainState:
    state = run.start()
    advance(run, state, steps)
    checkpoint.save(folder, state.step, state.tensors(), state.scalars())
    return state


def forked(folder: Path, run: Run, **how: bool) -> tuple[TrainState, str]:
    state = run.start()
    (notice,) = copy_matching_state(run, state, checkpoint.find(folder), rewound=False, **how)
    return state, notice


def update_norm(run: Run, state: TrainState) -> float:
    """Return the norm of the weights' change in the next step."""
    assert state.model is not None
    before = [parameter.detach().clone() for parameter in state.model.parameters()]
    advance(run, state, 1)
    moved = [after.detach() - was for after, was in zip(state.model.parameters(), before, strict=True)]
    return float(torch.stack([each.norm() for each in moved]).norm())


@pytest.mark.parametrize("kept_in", ["float32", "int8", "bfloat16"])
@pytest.mark.parametrize("goes_on_in", ["float32", "int8", "bfloat16"])
def test_moments_are_copied_between_storage_formats(kept_in: str, goes_on_in: str, tmp_path: Path) -> None:
    def run(form: str) -> Run:
        compact = [technique("precision.optimizer_state", format=form)] if form != "float32" else []
        return run_of(technique("optimizers.adamw"), *compact)

    old = trained(tmp_path, run(kept_in))
    state, notice = forked(tmp_path, run(goes_on_in))
    assert "start fresh" not in notice and "are left out" not in notice
    assert update_norm(run(goes_on_in), state) == pytest.approx(update_norm(run(kept_in), old), rel=0.05)


@pytest.mark.parametrize(
    ("old", "added"),
    [
        ("adamw", ["averaging.ema"]), ("adamw", ["averaging.latest"]), ("lion", ["averaging.ema"]),
        ("soap", ["averaging.ema"]), ("adafactor", ["averaging.latest"]),
    ],
)  # fmt: skip
def test_added_elements_have_age_zero_and_others_keep_theirs(old: str, added: list[str], tmp_path: Path) -> None:
    optimizer = technique(f"optimizers.{old}")
    run, other = run_of(optimizer), run_of(optimizer, *map(technique, added))
    before = trained(tmp_path, run)
    state, notice = forked(tmp_path, other)
    assert "start fresh" in notice and "are left out" not in notice
    assert update_norm(other, state) == pytest.approx(update_norm(run, before), rel=1e-5)
    assert state.optimizer is not None and set(state.optimizer.births.values()) == {6}


def test_separate_ages_are_resumed(tmp_path: Path) -> None:
    run = run_of(technique("optimizers.adamw"), technique("averaging.ema"))
    trained(tmp_path / "old", run_of(technique("optimizers.adamw")))
    state, _ = forked(tmp_path / "old", run)
    advance(run, state, 2)
    checkpoint.save(tmp_path / "new", state.step, state.tensors(), state.scalars())
    again, stored = run.start(), checkpoint.load(tmp_path / "new")
    checkpoint.fill(checkpoint.find(tmp_path / "new"), again.tensors())
    again.load_scalars(stored.scalars)
    for each in (state, again):
        advance(run, each, 2)
    assert all(torch.equal(value, again.tensors()[name]) for name, value in state.tensors().items())


def test_all_moments_start_fresh_if_some_weights_are_new(tmp_path: Path) -> None:
    adamw = technique("optimizers.adamw")
    trained(tmp_path, run_of(adamw))
    run = run_of(adamw, technique("initializations.layer_scale"))
    state, notice = forked(tmp_path, run)
    assert "start fresh" in notice and state.optimizer is not None
    moments = [t for slot, tensors in state.optimizer.slots.items() if "scale_by_adam" in slot for t in tensors]
    assert moments and not any(bool(moment.any()) for moment in moments)
    assert state.optimizer.births == {"scale_by_adam": 6}


@pytest.mark.parametrize("left_out", ["adapters.lora", "adapters.bottleneck", "initializations.layer_scale"])
def test_weights_are_left_out_only_on_request(left_out: str, tmp_path: Path) -> None:
    adamw = technique("optimizers.adamw")
    trained(tmp_path, run_of(adamw, technique(left_out)))
    with pytest.raises(UsageError, match=r"lacks \d+ parameters .* would be lost") as refused:
        forked(tmp_path, run_of(adamw))
    assert "--drop-weights" in str(refused.value.fix)
    _, notice = forked(tmp_path, run_of(adamw), drop_weights=True)
    assert "are left out, such as parameters/" in notice


@pytest.mark.parametrize("placement", ["outside", "inside"])
def test_momenta_of_updates_and_of_gradients_differ(placement: str, tmp_path: Path) -> None:
    lars, sgd = technique("optimizers.lars", learning_rate_placement=placement), technique("optimizers.sgd")
    for old, new in ((sgd, lars), (lars, sgd)):
        folder = tmp_path / old.name
        trained(folder, run_of(old))
        state, notice = forked(folder, run_of(new))
        assert "start fresh" in notice and state.optimizer is not None
        (momentum,) = state.optimizer.slots.values()
        assert not any(bool(each.any()) for each in momentum)
