"""Ranks that `thrifty.train` starts itself, or takes from srun."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import user_work
from command_line import free_port

import thrifty
from thrifty.core.errors import UsageError
from thrifty.training.rendezvous import take_srun_ranks
from thrifty.training.sent_objects import can_be_sent, write_value

SCRIPT = """
import sys
import torch
import thrifty

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return {"x": torch.full((4,), float(index)), "y": torch.tensor(index % 2)}

def build():
    return torch.nn.Linear(4, 2)

def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

def main():
    data = {"data": Numbers(), "held_out": Numbers(), "loss": loss}
    run = thrifty.train(build, **data, budget=2, batch=8, ranks=2, runs=sys.argv[1], quiet=True)
    print(run.summary["status"], type(run.model).__name__)

"""


def script(folder: Path, ending: str) -> "subprocess.CompletedProcess[str]":
    (folder / "script.py").write_text(SCRIPT + ending)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "script.py", str(folder / "runs")]
    return subprocess.run(command, cwd=folder, env=variables, text=True, capture_output=True, timeout=300)


@pytest.mark.slow
def test_objects_of_the_script_itself_reach_the_ranks(tmp_path: Path) -> None:
    done = script(tmp_path, 'if __name__ == "__main__":\n    main()\n')
    assert done.stdout.split() == ["finished", "Linear"], done.stderr
    recipe = (tmp_path / "runs" / "run" / "recipe.toml").read_text()
    assert 'build = "script:build"' in recipe and "[techniques.parallelism.replicate]" in recipe


@pytest.mark.slow
def test_ranks_started_on_import_are_refused_with_a_fix(tmp_path: Path) -> None:
    done = script(tmp_path, "main()\n")
    assert done.returncode and 'put the call below `if __name__ == "__main__":`' in done.stderr


@pytest.mark.parametrize(("name", "value"), [("loss", lambda model, batch: model(batch["x"]).sum(1)), ("model", None)])
def test_objects_that_cannot_be_sent_are_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    def build() -> Any:
        return user_work.build()

    changed = {name: value or build}
    with pytest.raises(UsageError, match=f"{name} .*cannot be sent to other processes") as error:
        thrifty.train(**{**user_work.objects(), **changed}, budget=2, batch=16, ranks=2, runs=tmp_path, quiet=True)
    assert "top level of a module" in error.value.fix and not list(tmp_path.iterdir())


@pytest.mark.parametrize("file", [None, "<stdin>"])
def test_functions_of_a_prompt_are_refused_before_ranks_start(
    file: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(model: Any, batch: Any) -> None: ...

    main: Any = ModuleType("__main__")
    loss.__module__, loss.__qualname__, main.loss = "__main__", "loss", loss
    if file is not None:
        main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert not can_be_sent(main.loss)
    with pytest.raises(UsageError, match="at a prompt or on standard input") as error:
        write_value(main.loss, tmp_path / "value")
    assert "top level of a module" in error.value.fix


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("node[03-05,09]", "node03"), ("a,b", "a"), ("gpu-7", "gpu-7"), ("n[1,3]-x,m", "n1-x")],
)
def test_the_ranks_of_srun_are_taken(hosts: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    step = {"STEP_NUM_TASKS": "6", "PROCID": "4", "LOCALID": "1", "STEP_TASKS_PER_NODE": "3(x2)", "JOB_ID": "71"}
    for name, value in {**step, "STEP_NODELIST": hosts, "STEP_ID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    take_srun_ranks()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]) == ("4", "6", first)
    assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == ("1", "3")
    assert 20_000 <= int(os.environ["MASTER_PORT"]) < 30_000


@pytest.mark.slow
def test_two_processes_of_srun_train_one_run(tmp_path: Path) -> None:
    def variables(rank: int) -> dict[str, str]:
        step = {"STEP_NUM_TASKS": "2", "PROCID": str(rank), "LOCALID": str(rank), "STEP_TASKS_PER_NODE": "2"}
        srun = {f"SLURM_{name}": value for name, value in step.items()} | {"MASTER_PORT": str(port)}
        return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **srun}

    port = free_port()
    command = [sys.executable, user_work.__file__, str(tmp_path), "together", "4", "1"]
    processes = [subprocess.Popen(command, env=variables(rank)) for rank in range(2)]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    assert '"ranks": 2' in (tmp_path / "together" / "environment.json").read_text()
