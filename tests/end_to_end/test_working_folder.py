"""No command, and no process that it starts, runs Python files of the working folder, except the named module."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
from fast_techniques import WITHOUT_FAST

from thrifty.cli.verb_list import VERBS
from thrifty.core.child_python import SAFE, child_environment

SHORT = ("text", "--data", "my.txt", "--budget", "4steps")
SHORT += ("--set", "evaluation.examples=4", "--set", "data.vocabulary=300", "--set", "data.length=32")
COMPILED = (*SHORT, "--set", "model.width=32", "--set", "model.depth=2", "--set", "model.heads=2")
TEXT = (*COMPILED, *WITHOUT_FAST)
DIGITS = ("vit-digits", "--budget", "4steps", "--set", "model.width=16", "--set", "model.depth=1")
CHEAP = [
    ("train", *TEXT, "--name", "run"),
    ("resume", "run", "--fork", "forked", "--set", "budget.steps=5"),
    ("explain", *TEXT),
    ("check", *TEXT),
    ("report", "run"),
    ("export", "run", "exported"),
    ("sample", "run", "--prompt", "a", "--tokens", "2"),
    ("chat", "exported", "--prompt", "a", "--tokens", "2", "--template", "alpaca"),
    ("track", "run", "--to", "tensorboard"),
    ("board", "--no-open", "--port", "0"),
    ("estimate", "llama-nano", "--batch", "2", "--length", "16"),
    ("trace", "uniform", "--heads", "1"),
    ("simulate", "attention", "--designs", "dense", "--trace", "trace.safetensors"),
    ("lottery", *TEXT, "--name", "tickets", "--rounds", "1"),
    ("data", "list"),
    ("data", "look", "my.txt"),
    ("data", "get", "kjv"),
    ("data", "score", *DIGITS, "--runs", "1", "--out", "digits.scores"),
    ("data", "prune", "digits.scores"),
    ("predict", "run", "a text"),
    ("retrieve", "run"),
    ("list",),
    ("list", "recipes"),
    ("list", "studies"),
    ("list", "presets"),
    ("show", "adapters.lora"),
]
DEAR = [
    ("train", *COMPILED, "--name", "run"),
    ("doctor", "--quick", "--compile"),
    ("study", "width_lazy", "--set", "widths=[8]", "--seeds", "1", "--jobs", "1"),
    ("compare", *TEXT, "--variant", "--without gradients.clip", "--seeds", "1", "--equal-budget", "flops"),
    ("sweep", *TEXT, "--over", "data.batch=1,2", "--name", "searched"),
    ("check", *TEXT, "--mesh", "replicate=2"),
    ("plan", *TEXT),
    ("plan", *SHORT, *WITHOUT_FAST, "--model", "my_model:build"),
]
ENDS = {"board": 130, "data get": 1, "predict": 2, "retrieve": 2}
"""Exit codes other than 0: the board is stopped, the registry is unreachable, the run has no labels and no captions."""
MODEL = """
from thrifty.models.families import assemble
from thrifty.models.model_presets import PRESETS
from dataclasses import replace

def build():
    return assemble(replace(PRESETS["llama-nano"], vocabulary=300, width=32, depth=2, heads=2, kv_heads=2, length=32))
"""
DRIVER = """
from thrifty.core.child_python import leave_working_folder
leave_working_folder()
import json, os, signal, sys
from pathlib import Path
from threading import Timer
from thrifty.cli.main import main
ends = {}
for words in json.loads(sys.argv[1]):
    if words[0] == "board":
        Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    sys.argv = ["thrifty", *words]
    try:
        main(words)
    except SystemExit as end:
        code = end.code or 0
    ends[" ".join(words)] = code
Path("ends.json").write_text(json.dumps(ends))
"""


def traps() -> set[str]:
    """Return the names of all installed modules, of the standard library or not. Modules of other platforms are left
    out: packages try to import them, and find them in a working folder that a user's own model requires."""
    names = {name for name in (*sys.stdlib_module_names, *packages_distributions()) if name.isidentifier()}
    names = {name for name in names if name in sys.builtin_module_names or find_spec(name)}
    return {*names, "sitecustomize", "usercustomize"} - {"thrifty"}


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """Return a working folder with modules that leave a mark when they run."""
    (tmp_path / "my.txt").write_text("\n\n".join(Path(subprocess.__file__).read_text().split("\n\n")))
    for name in traps():
        (tmp_path / f"{name}.py").write_text(f"open('ran-{name}', 'w').close()\nraise SystemExit('ran {name}')\n")
    return tmp_path


def started(folder: Path, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Return a finished command in this folder, without access to a package registry."""
    variables = os.environ | {"THRIFTY_CACHE": str(folder / "cache"), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    variables.pop(SAFE, None)
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def drive(folder: Path, commands: Sequence[Sequence[str]]) -> None:
    """Run these commands one after the other in one process, and check their exit codes."""
    done = started(folder, [sys.executable, "-c", DRIVER, json.dumps(commands)])
    assert done.returncode == 0, done.stderr
    assert not [path.name for path in folder.glob("ran-*")], done.stderr
    for command, code in json.loads((folder / "ends.json").read_text()).items():
        expected = next((end for verb, end in ENDS.items() if command.startswith(verb)), 0)
        assert code == expected, f"{command}\n{done.stderr}"


def test_no_command_runs_files_of_the_working_folder(trapped: Path) -> None:
    drive(trapped, CHEAP)


def test_every_command_is_covered() -> None:
    assert {words[0] for words in (*CHEAP, *DEAR)} == set(VERBS)


@pytest.mark.slow
@pytest.mark.parametrize("words", DEAR, ids=lambda words: f"{words[0]}-{words[-1]}")
def test_no_started_process_runs_them(words: Sequence[str], trapped: Path) -> None:
    (trapped / "my_model.py").write_text(MODEL)
    drive(trapped, [words])


@pytest.fixture
def trapped_except_for_python(trapped: Path) -> Path:
    """Return a folder without traps for modules that `python -m` imports before Thrifty's."""
    own = subprocess.run(
        [sys.executable, "-c", "import runpy, sys; print(*sys.modules)"], capture_output=True, text=True
    )
    for name in own.stdout.split():
        (trapped / f"{name}.py").unlink(missing_ok=True)
    return trapped


def test_python_dash_m_runs_nothing_of_it(trapped_except_for_python: Path) -> None:
    done = started(trapped_except_for_python, [sys.executable, "-m", "thrifty", "doctor", "--help"])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_ranks_of_torchrun_run_nothing_of_it(trapped_except_for_python: Path) -> None:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    words = [torchrun, "--nproc-per-node", "2", "-m", "thrifty", "train", *TEXT, "--with", "parallelism.replicate"]
    done = started(trapped_except_for_python, words)
    assert not [path.name for path in trapped_except_for_python.glob("ran-*")], done.stderr
    assert done.returncode == 0, done.stderr


def test_a_started_process_searches_the_working_folder_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "", "/elsewhere"])
    variables = child_environment(MINE="1")
    assert variables["PYTHONPATH"] == os.pathsep.join(["/elsewhere", str(tmp_path)])
    assert (variables[SAFE], variables["MINE"]) == ("1", "1")
