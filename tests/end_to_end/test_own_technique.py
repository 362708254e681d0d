"""A user's own technique is one new file without any other edit."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from command_line import CommandLine

CONTRACT = Path(__file__).parents[1] / "contract" / "test_every_technique.py"
FILE = '''
    """Shrunk gradients (example): {title}.

    Paper       None; an example of a third-party technique.
    Promise     None.
    """

    from dataclasses import dataclass

    import torch

    from thrifty.core.stages import Stage
    from thrifty.core.technique import Numerics, Technique
    from thrifty.core.gradient_transform import GradientTransform, chain


    class Shrink(GradientTransform):
        name = "shrink"

        def __init__(self, factor):
            self.factor = factor

        def update(self, updates, slots, parameters, numbers):
            torch._foreach_mul_(updates, self.factor)
            return updates


    @dataclass(frozen=True)
    class Shrunk(Technique):
        stage, numerics = Stage.CLIP, Numerics.DIFFERENT

        factor: float = 0.5

        def update(self, transform):
            return chain(Shrink(self.factor), transform)
'''


@pytest.fixture(params=["a folder", "an entry point"])
def extended(thrifty: CommandLine, request: pytest.FixtureRequest) -> tuple[CommandLine, str]:
    """Return a command line that knows one more technique, and the technique's name."""
    if request.param == "a folder":
        name, home = "optimizers.shrunk", thrifty.folder / "mine" / "optimizers"
        home.mkdir(parents=True)
        (home / "shrunk.py").write_text(textwrap.dedent(FILE).format(title="half of each is kept"))
        thrifty.environment["THRIFTY_TECHNIQUES"] = str(home.parent)
        return thrifty, name
    site = thrifty.folder / "site"
    (site / "theirs-1.0.dist-info").mkdir(parents=True)
    (site / "theirs-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    entry = "[thrifty.techniques]\ntheirs.shrunk = their_package:Shrunk\n"
    (site / "theirs-1.0.dist-info" / "entry_points.txt").write_text(entry)
    (site / "their_package.py").write_text(textwrap.dedent(FILE).format(title="half of each is kept"))
    thrifty.environment["PYTHONPATH"] = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    return thrifty, "theirs.shrunk"


@pytest.mark.sampled(1)
def test_all_commands_use_it_without_another_edit(extended: tuple[CommandLine, str]) -> None:
    thrifty, name = extended
    about = "half of each is kept." if name.startswith("optimizers") else "from the package theirs"  # not loaded yet
    assert about in [row["about"] for row in thrifty.json("list") if row["name"] == name]
    card = thrifty.json("show", name)
    assert card["name"] == name and card["stage"] == "clip" and "update" in card["seams"]
    assert card["settings"] == [{"name": "factor", "type": "float", "default": 0.5}]
    words = thrifty.recipe("run", "--with", f"{name}:factor=0.25")
    rows = {row["name"]: row for row in thrifty.json("explain", *words[1:])["techniques"]}
    assert rows[name]["settings"] == {"factor": 0.25}
    assert thrifty.train("run", "--with", f"{name}:factor=0.25")["status"] == "finished"
    group, short = name.split(".")
    recipe = (thrifty.run("run") / "recipe.toml").read_text()
    assert f"[techniques.{group}.{short}]\nfactor = 0.25" in recipe
    done = thrifty(*thrifty.recipe("other", "--with", f"{name[:-1]}"), exit_code=2)
    assert f"did you mean '{name}'" in done.stderr


@pytest.mark.slow
def test_the_contract_test_includes_it(extended: tuple[CommandLine, str]) -> None:
    thrifty, _ = extended
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", str(CONTRACT), "-k", "shrunk"]
    done = subprocess.run(command, env=thrifty.variables(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "shrunk] PASSED" in done.stdout, done.stdout + done.stderr


def test_listing_runs_no_file_and_names_broken_ones(thrifty: CommandLine) -> None:
    home = thrifty.folder / "mine" / "optimizers"
    home.mkdir(parents=True)
    run = f"open({str(thrifty.folder / 'ran')!r}, 'w').close()\n"
    files = {
        "shrunk": f'"""Shrunk (example): one that would leave a mark."""\n{run}',
        "cut_off": f"{run}def update(",
        "empty": "",
        "failing": f"raise ValueError('of its own')\n{run}",
        "zeros": "a = 1\0",
    }
    for name, text in files.items():
        (home / f"{name}.py").write_text(text)
    os.mkfifo(home / "pipe.py")
    (home / "binary.py").write_bytes(b"\xff\xfe")
    thrifty.environment["THRIFTY_TECHNIQUES"] = str(home.parent)
    about = {row["name"]: row["about"] for row in thrifty.json("list")}
    assert about["optimizers.shrunk"] == "one that would leave a mark." and about["optimizers.adamw"]
    assert about["optimizers.empty"] == about["optimizers.failing"] == "no description"
    for name in ("cut_off", "zeros", "binary", "pipe"):
        assert "cannot be read" in about[f"optimizers.{name}"] and f"{name}.py" in about[f"optimizers.{name}"]
    failing = thrifty("show", "optimizers.failing", exit_code=2).stderr
    assert "'optimizers.failing' cannot be imported: ValueError: of its own" in failing and "failing.py" in failing
    assert not (thrifty.folder / "ran").exists()


def test_objectives_are_listed_with_complete_sentences(thrifty: CommandLine) -> None:
    assert all(row["about"].endswith(".") for row in thrifty.json("list", "objectives"))
