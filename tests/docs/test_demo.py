"""`make demo` runs commands that anybody could type, in an order that makes sense, and ends where one of them fails."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from typed_commands import parse

REPOSITORY = Path(__file__).parents[2]
STUB = r"""#!/bin/sh
for word; do printf '%s\037' "$word"; done >> commands
echo >> commands
[ "$1" = "$FAILS" ] && exit "$CODE" || exit 0
"""
"""Writes down how it was called, instead of what thrifty does."""


def told(folder: Path, *variables: str, fails: str = "", code: int = 0) -> tuple[list[list[str]], str, int]:
    """The commands of `make demo`, its output, and its exit code where the verb `fails` ends with `code`."""
    shutil.copyfile(REPOSITORY / "Makefile", folder / "Makefile")
    (folder / "tools").symlink_to(REPOSITORY / "tools")
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", ".venv/bin/pip", ".venv/installed"):  # as if it were installed
        (folder / name).touch()
    stub = folder / ".venv" / "bin" / "thrifty"
    stub.write_text(STUB)
    stub.chmod(0o755)
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES")}
    own |= {"DEMO_NAME": "story", "FAILS": fails, "CODE": str(code)}
    done = subprocess.run(["make", "demo", *variables], cwd=folder, env=own, capture_output=True, text=True)
    lines = (folder / "commands").read_text().splitlines()
    return [line.split("\037")[:-1] for line in lines], done.stdout, done.returncode


pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
STORY = ["data", "plan", "check", "compare", "train", "report", "sample"]


def test_every_command_is_shown_and_one_that_its_verb_takes(tmp_path: Path) -> None:
    commands, output, code = told(tmp_path, "COMPARISON_BUDGET=2s", "TRAIN_BUDGET=3s")
    assert code == 0 and [words[0] for words in commands] == STORY
    for words in commands:
        assert f"$ thrifty {words[0]} {words[1]}" in output
        parse(words)
    budgets = {words[0]: words[words.index("--budget") + 1] for words in commands if "--budget" in words}
    assert budgets == {"compare": "2s", "train": "3s"}
    assert "charts: runs/story-comparison/report.html" in output


def test_without_a_network_the_text_is_this_python(tmp_path: Path) -> None:
    commands, _, code = told(tmp_path, fails="data", code=1)
    assert code == 0
    assert [words[0] for words in commands if "python-stdlib" in words] == ["plan", "compare"]


def test_a_comparison_that_is_refused_leaves_the_rest_as_it_is(tmp_path: Path) -> None:
    commands, output, code = told(tmp_path, fails="compare", code=2)
    assert code == 0 and [words[0] for words in commands] == STORY
    assert "charts: none" in output


@pytest.mark.parametrize(("verb", "code"), [("check", 4), ("compare", 1), ("sample", 2)])
def test_it_ends_where_a_verb_fails(tmp_path: Path, verb: str, code: int) -> None:
    commands, output, ended = told(tmp_path, fails=verb, code=code)
    assert ended != 0 and commands[-1][0] == verb and "charts" not in output
