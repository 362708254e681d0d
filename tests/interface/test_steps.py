"""The loop itself: `thrifty.steps`, and observers of `thrifty.train`."""

from pathlib import Path
from typing import Any

import pytest
import torch
import user_work
from command_line import assert_equal

import thrifty
from thrifty.core.recipe import EvaluationSettings
from thrifty.training.checkpoint import load


def recipe(name: str, steps: int = 6) -> thrifty.Recipe:
    base = thrifty.Recipe(evaluation=EvaluationSettings(every=3))
    return thrifty.recipe(**user_work.objects(), recipe=base, name=name, batch=16, budget=steps)


def tensors(folder: Path) -> dict[str, Any]:
    return load(folder / "checkpoints").tensors


def test_a_loop_left_early_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = [record.loss for record in thrifty.steps(recipe("whole"), runs=tmp_path)]
    first = []
    for record in thrifty.steps(recipe("left"), runs=tmp_path):
        first.append(record.loss)
        if record.step == 2:
            break
    run = thrifty.report(tmp_path / "left")
    assert run.record.summary["status"] == "interrupted" and run.record.summary["exit_code"] == 0
    rest = [record.loss for record in thrifty.steps(tmp_path / "left", **user_work.objects())]
    assert first + rest == whole
    assert_equal(tensors(tmp_path / "left"), tensors(tmp_path / "whole"))


def test_a_returned_run_resumes_with_its_objects(tmp_path: Path) -> None:
    run = thrifty.train(recipe=recipe("asked"), observers=[lambda record: record.step < 3], runs=tmp_path, quiet=True)
    assert run.summary["steps"] == 3 and run.summary["status"] == "interrupted" and run.exit_code == 0
    assert [record.step for record in thrifty.steps(run)] == [4, 5, 6]


def test_observers_receive_steps_with_due_evaluations(tmp_path: Path) -> None:
    seen: list[thrifty.Record] = []
    run = thrifty.train(recipe=recipe("seen"), observers=[seen.append], runs=tmp_path, quiet=True)
    assert [record.step for record in seen] == [*range(1, 7)]
    assert [record.step for record in seen if record.held_out_loss is not None] == [3, 6]
    assert seen[-1].held_out_loss == run.loss and seen[-1].metrics == run.metrics


def test_a_users_evaluation_changes_no_bit_of_the_run(tmp_path: Path) -> None:
    def evaluate(record: thrifty.Record) -> None:
        record.model.eval()
        with torch.no_grad():
            record.model(torch.randn(4, 6))

    for name, observers in (("with", [evaluate]), ("without", [])):
        thrifty.train(recipe=recipe(name), observers=observers, runs=tmp_path, quiet=True)
    assert_equal(tensors(tmp_path / "with"), tensors(tmp_path / "without"))


def test_observer_exceptions_reach_the_caller_and_the_run(tmp_path: Path) -> None:
    def fail(record: thrifty.Record) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        thrifty.train(recipe=recipe("failed"), observers=[fail], runs=tmp_path, quiet=True)
    assert "KeyError" in thrifty.report(tmp_path / "failed").record.summary["error"]


def test_ranks_of_a_loop_are_those_that_torchrun_starts(tmp_path: Path) -> None:
    with pytest.raises(thrifty.ThriftyError, match="2 ranks require 2 processes") as error:
        next(thrifty.steps(recipe("several"), ranks=2, runs=tmp_path))
    assert "torchrun --nproc-per-node 2 script.py" in str(error.value) and not (tmp_path / "several").exists()
