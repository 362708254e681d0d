"""A user's script, checked strictly by a type checker and never run: `tests/interface/test_types.py`."""

from collections.abc import Iterator
from pathlib import Path
from typing import assert_type

import torch
from pandas import DataFrame
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

import thrifty as th
from thrifty.core.recipe import Recipe


class Rows(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 8

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ones(4), torch.tensor(index % 2)


def build_model(width: int = 4) -> nn.Module:
    return nn.Linear(width, 2)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits: Tensor = model(batch[0])
    return nn.functional.cross_entropy(logits, batch[1], reduction="none")


def accuracy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits: Tensor = model(batch[0])
    return (logits.argmax(1) == batch[1]).float()


def on_record(record: th.Record) -> bool:
    return record.loss > 0.1


def fit(batch: tuple[Tensor, Tensor]) -> None:
    fit = th.estimate(build_model(), batch, loss=loss_fn, optimizer=th.AdamW(), techniques=["recompute"], memory="24GB")
    assert_type(fit.fits, bool)
    assert_type(fit.peak, float)
    assert_type(fit.flops, float)
    assert_type(fit.parts["activations"], float)
    assert_type(fit.options[0].label, str)


def own_loop(batch: tuple[Tensor, Tensor], hidden: Tensor, head_weight: Tensor, labels: Tensor) -> None:
    model = nn.Linear(4, 2)
    assert_type(th.apply(model, "lora", rank=8), nn.Linear)
    assert_type(th.apply(model, th.Lora(rank=8)), nn.Linear)
    print(th.summary(model))
    optimizer = th.optim.Muon(model, lr=1e-3)
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    assert_type(th.apply(optimizer, "optimizer_state", format="int8"), th.optim.Muon)
    assert_type(th.apply((model, optimizer), "rigl", density=0.2, total_steps=10_000), tuple[nn.Linear, th.optim.Muon])
    with th.activation_budget(model, "50%"):
        loss = loss_fn(model, batch)
    assert_type(loss, Tensor)
    assert_type(th.losses.chunked_cross_entropy(hidden, head_weight, labels), Tensor)
    th.optim.AdamW([{"params": model.parameters(), "lr": 1e-3}], betas=(0.9, 0.99), weight_decay=0.0)
    th.optim.Lion(model.named_parameters())
    th.optim.Sgd(model.parameters(), lr=0.1).step()


def trainer(train_dataset: Rows, test_dataset: Rows) -> None:
    run = th.train(
        model=build_model,
        data=train_dataset,
        held_out=test_dataset,
        loss=loss_fn,
        metrics={"accuracy": accuracy},
        techniques=[th.AdamW(lr=2e-3), th.Cosine(warmup=0.05), "recompute"],
        budget="10min",
        name="mine",
        ranks=1,
        observers=[on_record],
    )
    assert_type(run, th.RunResult)
    th.train(model="qwen-folder", data="chats.jsonl", techniques=["lora"], memory="24GB")
    th.train(build_model, DataLoader(train_dataset, 4), held_out=test_dataset, loss=loss_fn)
    assert_type(run.loss, float | None)
    assert_type(run.metrics, dict[str, float])
    assert_type(run.model, nn.Module)
    assert_type(run.report(), th.RunReport)
    assert_type(run.records(), DataFrame)
    resumed = th.resume("runs/mine", model=build_model, data=train_dataset, held_out=test_dataset, loss=loss_fn)
    assert_type(resumed, th.RunResult)
    assert_type(th.steps(run), Iterator[th.Record])
    for record in th.steps(model=build_model, data=train_dataset, held_out=test_dataset, loss=loss_fn):
        assert_type(record.loss, float)
        assert_type(record.step, int)


def verbs(dataset: Rows) -> None:
    recipe = th.recipe(build_model, dataset, held_out=dataset, loss=loss_fn, metrics={"accuracy": accuracy})
    assert_type(recipe, Recipe)
    plan = th.plan(recipe, memory="16GB", allow="rounding")
    th.plan(model=build_model, data=dataset, held_out=dataset, loss=loss_fn, memory="16GB", allow="rounding")
    assert_type(plan.recipe, Recipe)
    assert_type(plan.rejected["muon"], str)
    assert_type(plan.export("accelerate", "acc.yaml"), Path)
    assert_type(plan.forecast.memory.value, float)
    assert_type(th.explain(plan.recipe).peak, float)
    report = th.check(plan.recipe)
    print(report.broken, report)
    verdict = th.compare(plan.recipe, {"lion": th.Lion(lr=2e-4)}, seeds=8, budget="1min")
    assert_type(verdict.verdicts, dict[str, str])
    print(verdict.table().rows, verdict.figure().save("race.pdf"))
    print(th.list("recipes")["kjv"], th.show("lora").card, th.doctor(quick=True))
    print(th.sample("runs/text", prompt="Once"), th.chat("runs/text").ask("Why?"), th.retrieve("runs/flip").recalls)
    print(th.export("runs/mine", "exported"), th.report("runs/mine").verdict, th.track("runs/mine", "tensorboard"))
    print(th.study("width_lazy", seeds=2), th.lottery(recipe, rounds=2).rounds, th.trace("runs/mine", "t.safetensors"))
    print(th.recommend_size(flops=1e18), th.fit_scaling_law(["runs/a", "runs/b"]))
    th.board("runs", open_browser=False)


def namespaces(optimizer: th.optim.Lion) -> None:
    print(th.datasets.known().entries[0].name, th.datasets.get("kjv"), th.datasets.look("digits"))
    print(th.datasets.preview("chats.jsonl").content.learned)
    scored = th.datasets.score("vit-digits", method="el2n", runs=2)
    assert_type(scored.file, Path)
    print(th.datasets.prune(scored.file, keep_fraction=0.5, order="hard").technique.keep)
    print(th.datasets.review(scored.file, "digits").doubted)
    step = th.simulate.cluster("gpt3-175b", mesh={"tensor": 8}, recompute="every")
    assert_type(step.report.mfu, float)
    print(step.figure(), th.simulate.published_runs(), th.simulate.published_accelerators(), th.simulate.gemm("t.csv"))
    print(th.simulate.attention("t.safetensors", ["elsa"], filters=["exact", "own"]).cases, th.simulate.spgemm(size=9))


class Mine(th.Technique):
    stage, numerics = th.Stage.PRECONDITION, th.Numerics.DIFFERENT
    factor: float = 2.0


def extend(values: th.DatasetMetric, whole: th.ModelMetric) -> None:
    assert_type(Mine(factor=3.0).factor, float)
    print(th.testing.check_technique(Mine), values, whole)
    try:
        th.apply(nn.Linear(4, 4), "layer_drop")
    except th.NeedsTrainer as error:
        print(error.fix)
    except th.ThriftyError as error:
        print(error)
