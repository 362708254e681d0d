"""No verb, and no process that one starts, runs Python files of the working folder, but for the module it is told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import CommandLine

from thrifty.core.child_python import SAFE, child_environment

TRAPS = ("torch", "numpy", "pip", "click", "rich", "psutil", "safetensors", "tokenizers", "jinja2", "tomllib", "uuid")
SMALL = (
    "--set",
    "model.width=32",
    "--set",
    "model.depth=2",
    "--set",
    "model.heads=2",
    "--set",
    "evaluation.examples=4",
)
TEXT = (
    "text",
    "--data",
    "my.txt",
    "--set",
    "data.vocabulary=300",
    "--set",
    "data.length=32",
    "--budget",
    "4steps",
    *SMALL,
)
VERBS = {
    "doctor": ("doctor", "--quick", "--compile"),
    "train": ("train", *TEXT, "--name", "run"),
    "explain": ("explain", *TEXT),
    "check": ("check", *TEXT),
    "compare": ("compare", *TEXT, "--variant", "--without gradients.clip", "--seeds", "1"),
    "plan": ("plan", *TEXT),
    "study": ("study", "width_lazy", "--set", "widths=[8]", "--seeds", "1", "--jobs", "1"),
}


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A working folder with modules that leave a mark where they are run."""
    (tmp_path / "my.txt").write_text("\n\n".join(Path(subprocess.__file__).read_text().split("\n\n")))
    for name in TRAPS:
        (tmp_path / f"{name}.py").write_text(f"open('ran-{name}', 'w').close()\nraise SystemExit('ran {name}')\n")
    return tmp_path


@pytest.mark.sampled(2)
@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_runs_what_lies_in_the_working_folder(verb: str, trapped: Path) -> None:
    variables = os.environ | {"THRIFTY_CACHE": str(trapped / "cache")}
    variables.pop(SAFE, None)
    done = subprocess.run(
        [sys.executable, "-m", "thrifty", *VERBS[verb]], cwd=trapped, env=variables, capture_output=True, text=True
    )
    assert not [path.name for path in trapped.glob("ran-*")], done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_ranks_of_torchrun_run_nothing_of_it(trapped: Path) -> None:
    own = CommandLine(trapped, fresh=True)
    own.environment[SAFE] = "1"  # torchrun is the user's own start
    own("train", *TEXT, "--name", "run", "--with", "parallelism.replicate", ranks=2)
    assert not [path.name for path in trapped.glob("ran-*")]


def test_a_started_process_looks_into_the_working_folder_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "", "/elsewhere"])
    variables = child_environment(MINE="1")
    assert variables["PYTHONPATH"] == os.pathsep.join(["/elsewhere", str(tmp_path)])
    assert (variables[SAFE], variables["MINE"]) == ("1", "1")
