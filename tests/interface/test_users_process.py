"""A run from Python leaves the user's process as it was: random numbers, signal handlers, the passed module."""

import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import user_work
from torch import Tensor, nn
from torch.nn import functional as F

import thrifty
from thrifty.core.errors import UsageError
from thrifty.training.stop_signals import ASKED, StopRequest


def train(runs: Path, **changed: Any) -> thrifty.RunResult:
    options = {"techniques": [thrifty.AdamW(lr=1e-2)], "budget": 6, "batch": 16, "runs": runs, "quiet": True}
    return thrifty.train(**{**user_work.objects(), **options, **changed})


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def seeded() -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)


def test_random_numbers_do_not_depend_on_a_run(tmp_path: Path) -> None:
    seeded()
    wanted = [draws(), draws()]
    seeded()
    run = train(tmp_path)
    assert draws() == wanted[0]
    assert run.model is not None and draws() == wanted[1]


def test_random_numbers_between_steps_do_not_depend_on_them(tmp_path: Path) -> None:
    seeded()
    wanted = [draws() for _ in range(6)]
    seeded()
    drawn = [draws() for _ in thrifty.steps(**user_work.objects(), budget=6, batch=16, runs=tmp_path)]
    assert drawn == wanted


def test_the_model_of_a_run_is_one_module(tmp_path: Path) -> None:
    run = train(tmp_path)
    with torch.no_grad():
        next(run.model.parameters()).zero_()
    assert not next(run.model.parameters()).any()
    assert next(run.load_model().parameters()).any()


def test_a_passed_module_is_named_as_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, model=user_work.build(), quiet=False)
    assert "a copy of the passed module" in capsys.readouterr().err
    train(tmp_path, name="function", quiet=False)
    assert "a copy of the passed module" not in capsys.readouterr().err


def test_a_second_ctrl_c_ends_the_run_but_not_the_process() -> None:
    said: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), StopRequest(said.append) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.signal == signal.SIGINT > ASKED and "Ctrl-C again" in said[0]
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_quiet_run_answers_ctrl_c(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def at_third(record: Any) -> None:
        if record.step == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(thrifty.RunInterrupted):
        train(tmp_path, observers=[at_third])
    assert "stopping after this step" in capsys.readouterr().err


def test_runs_that_end_in_any_order_restore_the_handlers() -> None:
    before = signal.getsignal(signal.SIGINT)
    first, second = StopRequest(), StopRequest()
    first.__enter__()
    second.__enter__()
    first.__exit__()
    assert signal.getsignal(signal.SIGINT) == second._remember
    second.__exit__()
    assert signal.getsignal(signal.SIGINT) is before


class KeepsOutput(nn.Module):
    """A module that keeps a computed tensor, as visualizations of attention do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = user_work.build_plain()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.inner(x)
        return self.last


def test_modules_that_keep_computed_tensors_are_trained(tmp_path: Path) -> None:
    model = KeepsOutput()
    fresh = train(tmp_path, model=model)
    model(torch.ones(2, 6))
    assert train(tmp_path, model=model).loss == fresh.loss


class KeepsFile(KeepsOutput):
    def __init__(self, file: Any) -> None:
        super().__init__()
        self.file = file


def test_modules_that_cannot_be_copied_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file, pytest.raises(UsageError, match="KeepsFile cannot be copied") as error:
        train(tmp_path, model=KeepsFile(file))
    assert "model=build_model" in error.value.fix


class Standardized(nn.Module):
    """A model whose buffers get their values, and one its size, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = user_work.build_plain()
        self.register_buffer("mean", None)
        self.register_buffer("size", None)
        self.register_buffer("bank", torch.zeros(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean, self.size = x.detach().mean(0), x.detach().norm()
            self.bank = torch.cat([self.bank, self.mean[None]])[-4:]
        return self.inner(x if self.mean is None else x - self.mean)


def test_buffers_made_in_training_are_loaded_and_resumed(tmp_path: Path) -> None:
    settings = {"checkpoints.every": 2}
    run = train(tmp_path, model=Standardized, budget=8, settings=settings)
    assert run.model.mean.any() and run.model.bank.shape == (4, 6) and run.model.size.ndim == 0
    part = train(tmp_path, model=Standardized, budget=8, name="part", settings=settings, observers=[stop_at_four])
    again = thrifty.resume(part, quiet=True)
    assert all(torch.equal(a, b) for a, b in zip(again.model.buffers(), run.model.buffers(), strict=True))


def stop_at_four(record: Any) -> bool:
    return record.step != 4


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.used, self.unused = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(F.relu(self.body(x)))


def test_parameters_without_gradient_are_named_once(tmp_path: Path) -> None:
    run = train(tmp_path, model=TwoHeads)
    notices = [line for line in (run.folder / "records.jsonl").read_text().splitlines() if "no gradient" in line]
    assert len(notices) == 1 and "2 trained parameters, such as 'unused.weight'" in notices[0]
    assert "weight decay of optimizers.adamw" in notices[0]
    assert "no gradient" not in (train(tmp_path).folder / "records.jsonl").read_text()
