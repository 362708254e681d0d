"""Recipes and run folders from strangers: no command runs a function that they name."""

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from command_line import CommandLine

from thrifty.cli.verb_list import VERBS

TRAP = "from pathlib import Path\nPath('imported').touch()\ndef build(**arguments):\n    Path('called').touch()\n"
RECIPE = ("explain", "check", "plan", "compare", "lottery", "train")
WORDS: dict[str, tuple[str, ...]] = {
    **{verb: (verb, "stranger.toml") for verb in RECIPE},
    "compare": ("compare", "stranger.toml", "--variant", "--set seed=3"),
    "sweep": ("sweep", "stranger.toml", "--over", "data.batch=1,2"),
    "study": ("study", "width_lazy", "--set", "widths=[8]", "--seeds", "1", "--jobs", "1"),
    "list": ("list", "recipes"),
    "show": ("show", "adapters.lora"),
    "doctor": ("doctor", "--quick"),
    "report": ("report", "stranger"),
    "track": ("track", "stranger", "--to", "tensorboard"),
    "resume": ("resume", "stranger"),
    "export": ("export", "stranger", "exported"),
    "sample": ("sample", "stranger"),
    "chat": ("chat", "stranger", "--prompt", "a"),
    "trace": ("trace", "stranger"),
    "predict": ("predict", "stranger", "a text"),
    "retrieve": ("retrieve", "stranger"),
    "data": ("data", "score", "stranger.toml", "--out", "a.scores"),
}
HARMLESS = {"study", "list", "show", "doctor", "report", "track", "board", "simulate", "estimate"}
"""Commands that read no model; a simulation starts with a trace of the run, which is refused."""
NAMES = ("os:system", "trap:build", "builtins:exec", "a.b.c:d.e", "builtins:eval", "trap:")


def stranger(thrifty: CommandLine, build: Any, arguments: Any) -> None:
    """Write a recipe, and a run folder whose recipe and checkpoints name a function."""
    (thrifty.folder / "trap.py").write_text(TRAP)
    run = thrifty.run("stranger")
    tables = tomllib.loads((run / "recipe.toml").read_text())
    tables["model"] = {"build": build, "arguments": arguments}
    (run / "recipe.toml").write_text(tomli_w.dumps(tables))
    (thrifty.folder / "stranger.toml").write_text(tomli_w.dumps(tables | {"name": "other"}))
    for scalars in run.glob("checkpoints/*/*.json"):
        content = json.loads(scalars.read_text())
        if "recipe" in content:
            content["recipe"]["model"] = tables["model"]
            scalars.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strangers")
    thrifty = CommandLine(folder)
    from command_line import write_corpus

    write_corpus(folder / "corpus")
    thrifty(*thrifty.recipe("stranger", steps=1))
    return folder


def copied(trained: Path, folder: Path) -> CommandLine:
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    return CommandLine(folder)


@pytest.mark.parametrize("verb", sorted(VERBS.keys() - HARMLESS))
def test_no_command_runs_the_function_of_a_stranger(verb: str, trained: Path, tmp_path: Path) -> None:
    thrifty = copied(trained, tmp_path)
    stranger(thrifty, "trap:build", {"command": "touch called"})
    done = thrifty(*WORDS.get(verb, (verb, "stranger.toml")), exit_code=2)
    assert "trap:build" in done.stderr and "never runs by itself" in done.stderr and "--model trap:build" in done.stderr
    assert not {"called", "imported"} & {file.name for file in tmp_path.iterdir()}


@pytest.mark.parametrize("verb", ["list", "report", "show", "track"])
def test_commands_that_read_runs_import_nothing_of_them(verb: str, trained: Path, tmp_path: Path) -> None:
    thrifty = copied(trained, tmp_path)
    stranger(thrifty, "trap:build", {"command": "touch called"})
    process = thrifty.start(*WORDS[verb])
    process.communicate(timeout=120)
    assert process.returncode in (0, 2)
    assert not {"called", "imported"} & {file.name for file in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        *((name, {"command": "touch called"}) for name in NAMES),
        (["os", "system"], {}),
        (3, {}),
        ({"os": "system"}, {}),
        ("os:system", "touch called"),
        ("os:system", {"command": {"a": 1}}),
        ("os:system", {"command": [[1]]}),
        ("os:system\n--model x:y", {}),
    ],
)
def test_hostile_names_are_refused_without_a_traceback(
    build: Any, arguments: Any, trained: Path, tmp_path: Path
) -> None:
    thrifty = copied(trained, tmp_path)
    stranger(thrifty, build, arguments)
    for words in (WORDS["explain"], WORDS["export"]):
        done = thrifty(*words, exit_code=2)
        assert "Traceback" not in done.stderr and "fix:" in done.stderr
    assert not {"called", "imported"} & {file.name for file in tmp_path.iterdir()}


def test_a_name_set_by_a_value_option_is_not_run(trained: Path, tmp_path: Path) -> None:
    thrifty = copied(trained, tmp_path)
    (tmp_path / "trap.py").write_text(TRAP)
    done = thrifty(*thrifty.recipe("set", "--set", "model.build=trap:build"), exit_code=2)
    assert "fix: --model package.module:name" in done.stderr
    assert not (tmp_path / "imported").exists()
