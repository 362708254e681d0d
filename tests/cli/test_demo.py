"""The demo gives commands that anybody could give, in an order that makes sense, and ends where one of them fails."""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click import Command, Group
from click.testing import CliRunner
from tiny_runs import technique

from thrifty.cli import demo
from thrifty.cli.main import thrifty
from thrifty.core.technique import Technique
from thrifty.recipes.language_recipes import plain
from thrifty.recipes.recipe_toml import write_recipe


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The words of each verb that was to be run; a verb in FAILING fails with that exit code."""
    words: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["-m", "thrifty"]
        words.append(command[3:])
        if command[3] == "plan":
            Path(command[command.index("--out") + 1]).write_text(
                write_recipe(replace(plain(), techniques=PLANNED["techniques"]))
            )
        return subprocess.CompletedProcess(command, FAILING.get(command[3], 0))

    monkeypatch.setattr(subprocess, "run", run)
    return words


FAILING: dict[str, int] = {}
PLANNED: dict[str, tuple[Technique, ...]] = {"techniques": (*plain().techniques, technique("memory.recompute"))}
"""What is in the plan that is made."""


def test_every_command_of_it_is_one_that_the_verb_understands(given: list[list[str]], tmp_path: Path) -> None:
    done = CliRunner().invoke(demo.command, ["--runs", str(tmp_path), "--name", "story"])
    assert done.exit_code == 0, done.output
    assert [words[0] for words in given] == ["data", "plan", "check", "compare", "train", "report", "sample"]
    for words in given:
        assert f"$ thrifty {words[0]}" in done.output
        _parse(thrifty, words)
    assert "story-race" in done.output and not list(tmp_path.glob("**/*.html"))


def test_without_a_network_the_text_is_this_python(
    given: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAILING, "data", 1)
    done = CliRunner().invoke(demo.command, ["--runs", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert all("python-stdlib" in words for words in given if words[0] in ("plan", "compare"))


def test_a_plan_that_changes_nothing_is_trained_and_not_raced(
    given: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PLANNED, "techniques", plain().techniques)
    done = CliRunner().invoke(demo.command, ["--runs", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert [words[0] for words in given] == ["data", "plan", "check", "train", "report", "sample"]
    assert "nothing to race" in done.output and "verdict" not in done.output


def test_it_ends_where_a_verb_fails_with_its_exit_code(
    given: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAILING, "check", 4)
    done = CliRunner().invoke(demo.command, ["--runs", str(tmp_path)])
    assert done.exit_code == 4 and given[-1][0] == "check"


def _parse(command: Command, words: list[str]) -> None:
    """Raises UsageError for words that a command or the ones below it do not understand."""
    context = command.make_context(command.name, list(words))
    if isinstance(command, Group):
        name, found, words = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None, name
        _parse(found, words)
