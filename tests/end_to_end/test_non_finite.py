"""A non-finite loss or gradient never reaches parameters or optimizer state."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch, BatchSource, MappedSource
from thrifty.core.errors import ThriftyError
from thrifty.core.objective import Objective
from thrifty.core.recipe import Budget, CheckpointSettings, DataSettings, ModelSettings, Recipe
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.objectives.next_token import NextToken
from thrifty.techniques.gradients.clip import GradientClipping
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.training.checkpoint import load
from thrifty.training.loop import PATIENCE
from thrifty.training.loop import train as loop
from thrifty.training.run_setup import prepare_run
from thrifty.training.trained_model import load_trained_model
from thrifty.training.trainer import train


class Spoiled(NextToken):
    """An objective that adds a value of the batch to each loss: 0, NaN or infinity."""

    def losses(self, prediction, batch: Batch) -> Tensor:  # type: ignore[override]
        return super().losses(prediction, batch) + batch.fields.get("poison", torch.zeros(1))


class Spoil(Technique):
    """A technique with a non-finite loss or gradient from the step `start` on."""

    stage, numerics = Stage.SOURCE, Numerics.DIFFERENT

    start: int = 3
    steps: int = 2
    poison: float = float("nan")
    where: Literal["loss", "gradient"] = "loss"

    def batches(self, source: BatchSource) -> BatchSource:
        def marked(step: int, batch: Batch) -> Batch:
            bad = self.start <= step < self.start + self.steps
            poison = torch.full((len(batch),), self.poison if bad else 0.0)
            return Batch({**batch.fields, "poison": poison}, batch.weight)

        return MappedSource(source, marked)

    def objective(self, objective: Objective) -> Objective:
        return Spoiled() if self.where == "loss" else objective

    def backward(self, backward: Backward) -> Backward:
        def spoiled(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
            outcome = backward(model, objective, batch)
            if self.where == "gradient":
                gradient = next(model.parameters()).grad
                assert gradient is not None
                gradient.view(-1)[:1].add_(batch["poison"][0])
            return outcome

        return spoiled


@pytest.fixture
def recipe(common_folder: Path) -> Recipe:
    return Recipe(
        name="run",
        model=ModelSettings(preset="llama-nano", width=32, depth=2),
        data=DataSettings(source=str(common_folder / "corpus"), vocabulary=320, length=32, batch=8),
        budget=Budget(steps=8),
        checkpoints=CheckpointSettings(every=2),
        techniques=(AdamW(lr=1e-3), GradientClipping()),
    )


def spoiled_by(recipe: Recipe, **settings: object) -> Recipe:
    return replace(recipe, techniques=(*recipe.techniques, Spoil(**settings)))  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_step_changes_nothing(recipe: Recipe, poison: float, where: str) -> None:
    run = prepare_run(spoiled_by(recipe, poison=poison, where=where), quiet=True).run
    state = run.start()
    before, updates, skipped = {}, 0, []
    with closing(loop(run, state, seed=0)) as records:
        for record in records:
            now = {name: tensor.clone() for name, tensor in state.tensors().items()}
            assert all(tensor.isfinite().all() for tensor in now.values())
            assert state.optimizer is not None
            if record.skipped:
                skipped.append(record.step)
                assert all(torch.equal(now[name], before[name]) for name in now)
                assert state.optimizer.updates == updates
            else:
                updates += 1
            before = now
    assert skipped == [4, 5] and updates == 6 and state.counters["skipped"] == 2


def test_skipped_steps_are_recorded_and_counted(recipe: Recipe, tmp_path: Path) -> None:
    summary = train(spoiled_by(recipe), tmp_path, quiet=True)
    assert summary["status"] == "finished" and summary["skipped_steps"] == 2
    lines = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if line["kind"] == "step"}
    assert [step for step, line in steps.items() if line["skipped"]] == [4, 5]
    assert steps[4]["loss"] is None and steps[3]["loss"] is not None
    assert any("step 4 skipped" in line["text"] for line in lines if line["kind"] == "notice")


def test_many_skipped_steps_stop_the_run_with_an_explanation(recipe: Recipe, tmp_path: Path) -> None:
    endless = spoiled_by(replace(recipe, budget=Budget(steps=40)), steps=100, start=4)
    with pytest.raises(ThriftyError, match=f"not finite in {PATIENCE} steps in a row, up to step 14") as stopped:
        train(endless, tmp_path, quiet=True)
    assert "lower the learning rate" in stopped.value.fix and stopped.value.exit_code == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "stopped" and summary["exit_code"] == 1 and summary["steps"] == 14


def test_checkpoints_before_skipped_steps_remain_usable(recipe: Recipe, tmp_path: Path) -> None:
    train(
        replace(recipe, name="short", budget=Budget(steps=4), checkpoints=CheckpointSettings(every=4)),
        tmp_path,
        quiet=True,
    )
    endless = spoiled_by(recipe, steps=100, start=4)
    with pytest.raises(ThriftyError):
        train(replace(endless, budget=Budget(steps=40)), tmp_path, quiet=True)
    good, last = (load(tmp_path / name / "checkpoints").tensors for name in ("short", "run"))
    assert all(tensor.isfinite().all() for tensor in last.values())
    assert all(torch.equal(good[name], last[name]) for name in good)
    restored, _ = load_trained_model(tmp_path / "short")
    assert all(parameter.isfinite().all() for parameter in restored.parameters())


class LoseWeights(Technique):
    """A technique that sets a weight to infinity in one step whose own loss is still finite."""

    stage, numerics = Stage.SOURCE, Numerics.DIFFERENT

    step: int = 5

    def backward(self, backward: Backward) -> Backward:
        steps = iter(range(1, 100))

        def losing(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
            outcome = backward(model, objective, batch)
            if next(steps) == self.step:
                with torch.no_grad():
                    next(model.parameters()).fill_(torch.inf)
            return outcome

        return losing


@pytest.mark.parametrize(("step", "newest"), [(5, 4), (7, 6), (1, None)])
def test_weights_without_a_finite_loss_are_not_saved(
    recipe: Recipe, tmp_path: Path, step: int, newest: int | None
) -> None:
    lost = replace(recipe, techniques=(*recipe.techniques, LoseWeights(step=step)))
    with pytest.raises(ThriftyError, match=r"is not finite: nan in training, nan on held-out"):
        train(lost, tmp_path, quiet=True)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("stopped", 1)
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert (saved[-1] if saved else None) == (newest and f"step-{newest:08}")
    if newest:
        assert all(t.isfinite().all() for t in load(tmp_path / "run" / "checkpoints").tensors.values())
