"""The trainer on models, datasets, losses and metrics of the user's own."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import user_models
import user_work
from command_line import CommandLine, assert_equal, write_corpus
from torch import Tensor, nn
from torch.utils.data import DataLoader, WeightedRandomSampler

import thrifty
from thrifty.composition.compose import BaseRun, compose
from thrifty.core.errors import RefusedError, ThriftyError, UsageError
from thrifty.core.recipe import EvaluationSettings, Recipe
from thrifty.data.user_data import open_user_data
from thrifty.objectives.user_loss import UserLoss
from thrifty.techniques.large_batch.gradient_accumulation import GradientAccumulation
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.training import checkpoint
from thrifty.training.loop import train as steps_of


def train(runs: Path, **changed: Any) -> thrifty.RunResult:
    options = {"techniques": [thrifty.AdamW(lr=1e-2)], "budget": 30, "batch": 16, "runs": runs, "quiet": True}
    return thrifty.train(**{**user_work.objects(), **options, **changed})


def test_a_module_a_dataset_and_a_loss_are_trained_and_judged(tmp_path: Path) -> None:
    run = train(tmp_path, budget="6 epochs", name="own")
    assert run.loss is not None and run.loss < 0.4 and run.metrics["accuracy"] > 0.8
    assert len(run.records()) == 75 and "accuracy" in repr(run)
    example = user_work.NoisySums(60, 1000)[0]
    assert run.model(example["x"][None]).shape == (1, 2)
    assert run.report().summary["status"] == "finished"


def test_runs_without_metrics_end_with_loss_and_sizes(tmp_path: Path) -> None:
    run = train(tmp_path, metrics={}, budget=3)
    assert f"held-out loss {run.loss:.3f}" in repr(run)
    assert "kB" in repr(thrifty.explain(**user_work.objects(), budget=3, quiet=True))
    batch = {"x": torch.randn(4, 6), "y": torch.zeros(4).long()}
    assert "kB" in repr(thrifty.estimate(user_work.build, batch, loss=user_work.loss))


def test_runs_print_how_many_held_out_examples_are_evaluated(tmp_path: Path) -> None:
    for count, is_said in ((64, False), (80, True)):
        run = train(tmp_path, held_out=user_work.NoisySums(count, 1000), budget=2, name=f"of-{count}")
        records = (run.folder / "records.jsonl").read_text()
        assert ("64 of 80 held-out examples are judged" in records) is is_said


def test_a_module_that_exists_already_is_trained_as_a_copy(tmp_path: Path) -> None:
    model = user_work.build()
    before = [parameter.clone() for parameter in model.parameters()]
    run = train(tmp_path, model=model)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    function = train(tmp_path, name="function")
    assert run.loss == function.loss


@pytest.mark.parametrize(
    "data",
    [lambda: DataLoader(user_work.NoisySums(200), batch_size=16, shuffle=True), lambda: user_work.NoisySums(200)],
)
def test_a_data_loader_is_taken_apart_into_its_dataset(data: Any, tmp_path: Path) -> None:
    assert train(tmp_path, data=data(), batch=None if isinstance(data(), DataLoader) else 16).loss == pytest.approx(
        0.4437, abs=0.2
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"held_out": None}, "held-out"),
        (
            {"data": DataLoader(user_work.NoisySums(9), sampler=WeightedRandomSampler([1.0] * 9, 9))},
            "sampler of its own",
        ),
        ({"data": iter([1])}, "can be read once only"),
        ({"data": user_work.NoisySums(9)}, "fewer than one batch of 16"),
        ({"loss": lambda model, batch: "a"}, "the loss of a batch of 16 examples is a str"),
        ({"loss": lambda model, batch: model(batch["x"])[:3].sum(1)}, "a tensor of shape \\(3,\\)"),
        ({"loss": None}, "no loss was passed"),
        ({"budget": "6 weeks"}, "is not an amount"),
        ({"techniques": ["lorra"]}, "did you mean"),
        ({"collate": lambda examples: {"x": 3}}, "has no row for each example"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_the_fix(
    changed: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ThriftyError, match=words) as error:
        train(tmp_path, **changed)
    assert error.value.fix


def test_a_named_loss_that_cannot_call_the_model_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("All models are wrong, but some are useful.\n" * 400, "utf-8")
    with pytest.raises(RefusedError, match=r"the objective masked_token cannot call \S+Bart: ValueError") as refused:
        thrifty.train(
            Bart, str(text), loss="masked_token", budget=2, batch=4, runs=tmp_path, quiet=True,
            settings={"data.length": 12, "data.vocabulary": 300},
        )  # fmt: skip
    assert "loss=, a function of (model, batch)" in refused.value.fix
    assert not (tmp_path / "run").exists()


class Bart(nn.Module):
    """A model that needs a second input, which no objective of one text passes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(400, 8), nn.Linear(8, 400)

    def forward(self, tokens: Tensor, later: Tensor | None = None) -> Tensor:
        if later is None:
            raise ValueError("specify the tokens of the decoder")
        return self.head(self.tokens(tokens) + self.tokens(later))


def final_tensors(runs: Path, name: str) -> dict[str, Tensor]:
    return checkpoint.load(runs / name / "checkpoints").tensors


def killed_to_the_end(runs: Path, steps: int, kills: int, ranks: int) -> None:
    """Start the script of `user_work`, and kill it and its ranks so many times before it may end."""
    command = [sys.executable, user_work.__file__, str(runs), "killed", str(steps), str(ranks)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    records = runs / "killed" / "records.jsonl"
    for number in range(kills):
        process = subprocess.Popen(command, env=environment)
        wanted = (number + 1) * steps // (kills + 1)
        while process.poll() is None and (not records.exists() or records.read_text().count('"loss"') < wanted):
            time.sleep(0.01)
        for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()
    subprocess.run(command, check=True, env=environment)


@pytest.mark.parametrize(
    ("kills", "ranks"),
    [
        (2, 1),
        pytest.param(1, 2, marks=pytest.mark.slow),
        pytest.param(20, 1, marks=pytest.mark.slow),
        pytest.param(20, 2, marks=pytest.mark.slow),
    ],
)
def test_killed_runs_on_random_datasets_end_bit_identical(kills: int, ranks: int, tmp_path: Path) -> None:
    steps = 60 + 10 * kills
    command = [sys.executable, user_work.__file__, str(tmp_path), "straight", str(steps), str(ranks)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    killed_to_the_end(tmp_path, steps, kills, ranks)
    assert_equal(final_tensors(tmp_path, "killed"), final_tensors(tmp_path, "straight"))


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, thrifty.RunInterrupted), (signal.SIGTERM, thrifty.RunTerminated)]
)
def test_signals_end_after_a_saved_step_with_a_resume_call(
    number: signal.Signals, kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def at_third(record: Any) -> None:
        if record.step == 3:
            signal.raise_signal(number)

    with pytest.raises(kind) as stopped:
        train(tmp_path, name="own", observers=[at_third], quiet=False)
    run = stopped.value.run
    folder = tmp_path / "own"
    line = f"thrifty.resume('{folder}', model=build, data=…, held_out=…, loss=loss, metrics=…)"
    assert run.summary["steps"] == 3 and run.summary["status"] == "interrupted" and run.exit_code == 128 + number
    assert line in repr(run) and line in capsys.readouterr().err
    assert issubclass(kind, KeyboardInterrupt if number == signal.SIGINT else SystemExit)
    assert line in str(stopped.value) if number == signal.SIGINT else stopped.value.code == 143
    with pytest.raises(KeyboardInterrupt):
        for record in thrifty.steps(run):
            if record.step == 5:
                signal.raise_signal(signal.SIGINT)
    assert thrifty.resume(run, quiet=True).summary["status"] == "finished"


def test_a_run_from_python_resumes_with_objects_by_name(tmp_path: Path) -> None:
    """Python records the class of a dataset; a command names a function that returns the dataset."""
    named = {name: "user_work:some_sums" for name in ("data", "held_out")}
    passed = dict.fromkeys(named, user_work.some_sums())
    common = {"model": "user_work:build", "loss": "user_work:loss", "quiet": True}
    settings = {"budget": 4, "batch": 16, "name": "own"}
    whole = thrifty.train(**common, **passed, **settings, runs=tmp_path / "whole")
    observers = [lambda record: record.step < 2]
    first = thrifty.train(**common, **passed, **settings, runs=tmp_path / "parts", observers=observers)
    second = thrifty.resume(first.folder, **common, **named)
    assert second.loss == whole.loss and (first.summary["status"], second.summary["status"]) == (
        "interrupted",
        "finished",
    )
    again = thrifty.train(**common, **passed, **settings, runs=tmp_path / "other", observers=observers)
    with pytest.raises(UsageError, match="not the one this run was started with"):
        thrifty.resume(again.folder, **common, data="user_work:Sentences", held_out="user_work:Sentences")


def test_a_resumed_run_whose_loss_has_changed_is_refused(tmp_path: Path) -> None:
    train(tmp_path, name="own")
    with pytest.raises(UsageError, match=r"the recipe names Python objects .loss: "):
        thrifty.resume(tmp_path / "own", **{**user_work.objects(), "loss": None})
    with pytest.raises(UsageError, match=r"loss: "):
        thrifty.resume(
            tmp_path / "own", **{**user_work.objects(), "loss": lambda model, batch: model(batch["x"]).sum()}
        )


def test_a_file_never_runs_the_function_that_it_names(tmp_path: Path) -> None:
    thrifty_verbs = CommandLine(tmp_path)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\nbuild = "os:system"\n[python]\nloss = "os:abort"\n[techniques.optimizers.adamw]\n')
    for verb in ("train", "explain", "plan"):
        refused = thrifty_verbs(verb, str(recipe), exit_code=2)
        assert "which a file never runs by itself" in refused.stderr


def losses_by_tokens(micro_batches: int) -> list[float]:
    data = open_user_data(user_work.Sentences(), user_work.Sentences(), 16, 0, user_work.padded)
    plain = BaseRun(user_work.build_language_model, data.train, UserLoss(user_work.token_loss, data.assembled))
    more = [GradientAccumulation(micro_batches=micro_batches)] if micro_batches > 1 else []
    run = compose(plain, [AdamW(lr=1e-2), *more], 6)
    return [record.loss for record in steps_of(run, run.start(), 0)]


def test_with_weights_tokens_count_alike_however_a_batch_is_cut() -> None:
    data = open_user_data(user_work.Sentences(), user_work.Sentences(), 16, 0, user_work.padded)
    losses, weights = user_work.token_loss(user_work.build_language_model(), data.assembled(data.train.at(0)))
    whole = losses_by_tokens(1)
    assert whole[0] == pytest.approx(float((losses * weights).sum() / weights.sum()), rel=1e-6)
    assert losses_by_tokens(4) == pytest.approx(whole, rel=1e-5)
    assert losses_by_tokens(16) == pytest.approx(whole, rel=1e-5)


def test_example_order_is_independent_of_ranks_and_workers(tmp_path: Path) -> None:
    losses = {}
    loader = DataLoader(user_work.NoisySums(200), batch_size=16, shuffle=True, num_workers=2)
    for name, changed in {"alone": {}, "two": {"ranks": 2}, "workers": {"data": loader}}.items():
        run = train(tmp_path, **{"model": user_work.build_plain, "budget": 8, "name": name, **changed})
        losses[name] = [step["loss"] for step in run.report().record.steps]
    assert losses["two"] == pytest.approx(losses["alone"], rel=1e-5)
    assert losses["workers"] == losses["alone"]


def test_reading_twice_is_equal_and_keeps_global_generators() -> None:
    data = open_user_data(user_work.NoisySums(200), user_work.NoisySums(60), 16, 0)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    batch = data.train.at(5)
    assert torch.equal(torch.rand(2), expected)
    parts = [data.train.rows(5, start, start + 4) for start in range(0, 16, 4)]
    for name in batch.fields:
        assert torch.equal(batch[name], torch.cat([part[name] for part in parts]))
        assert torch.equal(batch[name], data.train.at(5)[name])


def test_a_refused_sampler_names_the_reason() -> None:
    with pytest.raises(RefusedError, match="a function of seed and step"):
        open_user_data(DataLoader(user_work.NoisySums(9), sampler=[0, 1]), user_work.NoisySums(9), 2, 0)


def test_a_recipe_provides_arguments_that_are_not_passed(tmp_path: Path) -> None:
    from thrifty.core.recipe import Budget, DataSettings, Recipe

    write_corpus(tmp_path / "corpus")
    data = DataSettings(source=str(tmp_path / "corpus"), vocabulary=320, length=16, batch=8)
    recipe = Recipe("whole", data=data, budget=Budget(steps=2), techniques=(thrifty.Lion(),))
    run = thrifty.train(recipe=recipe, runs=tmp_path, quiet=True)
    assert run.summary["steps"] == 2 and run.folder == tmp_path / "whole"
    assert "lion" in (run.folder / "recipe.toml").read_text()
    again = {"recipe": recipe, "runs": tmp_path / "again", "quiet": True}
    same = thrifty.train("llama-nano", tmp_path / "corpus", **again)
    assert same.loss == run.loss


def test_evaluations_may_have_their_own_batch(tmp_path: Path) -> None:
    def size(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return torch.full((len(batch["x"]),), float(len(batch["x"])))

    settings = {"evaluation.batch": 20, "evaluation.examples": 40}
    run = train(tmp_path, metrics={"size": size}, budget=2, settings=settings)
    assert run.metrics["size"] == 20.0


def better_until(step: int) -> Any:
    """A metric that rises with each evaluation up to so many, and then falls."""
    seen = []

    def metric(model: Any) -> float:
        seen.append(1)
        return min(len(seen), 2 * step - len(seen))

    return thrifty.ModelMetric(metric)


@pytest.mark.parametrize("lower_is_better", [None, True])
def test_a_run_stops_early_without_improvement(lower_is_better: bool | None, tmp_path: Path) -> None:
    settings = EvaluationSettings(every=2, judge="score", patience=2, lower_is_better=lower_is_better)
    recipe = Recipe("early", evaluation=settings)
    run = train(tmp_path, recipe=recipe, metrics={"score": better_until(3)}, budget=30)
    assert run.summary["status"] == "finished"
    assert run.summary["steps"] == (6 if lower_is_better else 10)  # the best evaluation and two more
    assert "held-out score has not improved for 2 evaluations" in repr(run)
    assert checkpoint.load(run.folder / "checkpoints").step == run.summary["steps"]
    with pytest.raises(UsageError, match="it stopped early"):
        thrifty.resume(run)


def test_early_stopping_is_exact_after_interruption(tmp_path: Path) -> None:
    def validate(model: Any) -> float:
        return float(next(model.parameters()).sum())

    recipe = Recipe("early", evaluation=EvaluationSettings(every=1, judge="score", patience=3))
    options = {"recipe": recipe, "metrics": {"score": thrifty.ModelMetric(validate)}, "budget": 60}
    whole = train(tmp_path, name="whole", **options)
    part = train(tmp_path, name="part", observers=[lambda record: record.step != 2], **options)
    assert part.summary["status"] == "interrupted" and whole.summary["steps"] < 60
    again = thrifty.resume(part)
    assert again.summary["steps"] == whole.summary["steps"] and again.metrics == whole.metrics


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"recipe": Recipe("r", evaluation=EvaluationSettings(judge="accurcy"))}, "did you mean 'accuracy'"),
        ({"metrics": {"loss": user_work.accuracy}}, "cannot be called 'loss'"),
        ({"metrics": {"my metric": user_work.accuracy}}, "cannot be called 'my metric'"),
    ],
)
def test_a_measure_that_is_not_there_is_refused(changed: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        train(tmp_path, **changed)


def test_a_runs_model_keeps_unmergeable_adapters(tmp_path: Path) -> None:
    work = {name: value for name, value in user_models.language_work().items() if name != "metrics"}
    run = thrifty.train(**work, techniques=["bottleneck"], budget=2, runs=tmp_path, quiet=True)
    plain = {name for name, _ in work["model"]().named_parameters()}
    names = {name for name, _ in run.model.named_parameters()}
    assert plain < names and not run.model.training
