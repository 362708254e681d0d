"""The trainer and the verbs as a user writes them, on models, data and losses of their own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import user_models
from chat_runs import sums, write_rows
from user_models import accuracy, build_classifier, label_loss

import thrifty as th
from thrifty.core.recipe import DataSettings, EvaluationSettings, ModelSettings, Recipe

WORKS = pytest.mark.parametrize(
    "work",
    [
        user_models.label_work,
        user_models.language_work,
        user_models.causal_work,
        user_models.class_work,
        user_models.copy_work,
    ],
)
Work = Callable[[], dict[str, Any]]


def test_the_trainer_takes_own_model_data_loss_and_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train_dataset, test_dataset = user_models.Sequences(64), user_models.Sequences(32, 1)
    seen: list[th.Record] = []
    run = th.train(
        model=build_classifier,
        data=train_dataset,
        held_out=test_dataset,
        loss=label_loss,
        metrics={"accuracy": accuracy},
        techniques=[th.AdamW(lr=2e-3), th.Cosine(warmup=0.05), "recompute"],
        budget="4 steps",
        name="mine",
        observers=[seen.append],
        quiet=True,
    )
    assert run.loss is not None and 0 <= run.metrics["accuracy"] <= 1 and len(run.records()) == len(seen) == 4
    assert isinstance(run.model, user_models.Classifier) and "mine" in str(run.report())
    with pytest.raises(th.ThriftyError, match="is finished"):
        objects = {"data": train_dataset, "held_out": test_dataset, "metrics": {"accuracy": accuracy}}
        th.resume("runs/mine", model=build_classifier, loss=label_loss, **objects)
    recipe = th.recipe(**user_models.label_work(), budget="2 steps", name="steps")
    assert [record.step for record in th.steps(recipe)] == [1, 2]


@pytest.mark.slow
def test_the_shortest_fine_tuning_plans_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "chats.jsonl", sums(400))
    small = Recipe(
        model=ModelSettings(depth=2, width=32, heads=2, hidden=64),
        data=DataSettings(vocabulary=320, length=48, batch=8),
        evaluation=EvaluationSettings(examples=8),
    )
    base = th.train(data="chats.jsonl", loss="chat_answers", recipe=small, budget=2, name="base", quiet=True)
    th.export(base, "qwen-folder")
    run = th.train(
        model="qwen-folder", data="chats.jsonl", techniques=["lora"], memory="24GB", batch=8, budget=2, quiet=True
    )
    recipe = run.report().record.recipe
    assert recipe["objective"]["name"] == "chat_answers" and "lora" in recipe["techniques"]["adapters"]
    assert run.loss is not None and run.folder.name == "run"


@pytest.mark.slow
@WORKS
def test_a_plan_is_explained_checked_compared_and_exported(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = th.plan(**work(), memory="16GB", allow="rounding", batch=16, budget="20 steps", probe=False, quiet=True)
    assert plan.forecast.memory.value > 0 and "allows only rounding" in plan.rejected["muon"]
    assert plan.rejected["muon"] == plan.rejected["optimizers.muon"]
    assert "mixed_precision" in plan.export("accelerate", "acc.yaml").read_text()
    explanation = th.explain(plan.recipe, quiet=True)
    assert "optimizers.adamw" in str(explanation) and explanation.peak > 0 and not explanation.refused
    report = th.check(plan.recipe, quiet=True)
    assert not report.broken, report
    verdict = th.compare(
        plan.recipe,
        {"lion": th.Lion(lr=2e-4)},
        seeds=1,
        budget="12 steps",
        rate_trials=1,
        equal_budget="steps",
        warmup_steps=2,
        quiet=True,
    )
    assert [row["variant"] for row in verdict.table().as_dict()] == ["baseline", "lion"]
    assert verdict.figure().save("race.pdf").read_bytes().startswith(b"%PDF")


def test_verbs_take_names_and_arguments_in_place_of_a_recipe(tmp_path: Path) -> None:
    work = user_models.label_work()
    assert "train examples" in str(th.explain(**work, budget=3, quiet=True))
    assert th.recipe(recipe="vit-digits").name == "vit-digits"
    with pytest.raises(th.ThriftyError, match="did you mean 'kjv'"):
        th.explain("kvj")
