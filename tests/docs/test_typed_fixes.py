"""Commands and options in errors, cards and documents are accepted by the command line."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from click import Command, Context, Group

from thrifty import techniques
from thrifty.cli.main import thrifty
from thrifty.core.recipe import Recipe
from thrifty.simulators.accelerator.trace_file import FORMAT

ROOT = Path(__file__).parents[2]
FOREIGN = {"--nproc-per-node"}
"""Options of torchrun."""


def literal(node: ast.expr) -> Iterator[str]:
    """The texts of an expression, with {} for values that are put into them."""
    for part in ast.walk(node):
        if isinstance(part, ast.JoinedStr):
            yield "".join(piece.value if isinstance(piece, ast.Constant) else "{}" for piece in part.values)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


@cache
def fixes() -> list[tuple[str, str]]:
    """Each fix of an error, with the place of it."""
    return [
        (f"{path.relative_to(ROOT)}:{call.lineno}", text)
        for path in (ROOT / "src").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg == "fix"
        for text in literal(keyword.value)
    ]


@cache
def texts() -> list[tuple[str, str]]:
    """Each fix, text of the package and document."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "generated" not in page.parts]
    documents = [
        (path.name, path.read_text(encoding="utf-8")) for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *pages)
    ]
    package = [
        (f"{path.relative_to(ROOT)}:{node.lineno}", node.value)
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return [*fixes(), *documents, *package]


def commands(command: Command = thrifty, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    """Each verb with the options that it takes."""
    yield words, {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
    if isinstance(command, Group):
        context = Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below, (*words, name))


OPTIONS = dict(commands())
VERBS = {words[0] for words in OPTIONS if words}


def options_of(words: list[str]) -> set[str]:
    """All options of the verb that a command begins with; `plan RECIPE` is short for `plan recipe RECIPE`."""
    most = max((verb for verb in OPTIONS if tuple(words[: len(verb)]) == verb), key=len)
    return OPTIONS[most] | (OPTIONS["plan", "recipe"] if most == ("plan",) else set()) | {"--help", "-h"}


def test_every_option_of_a_fix_is_one_of_some_verb() -> None:
    known = set().union(*OPTIONS.values()) | FOREIGN | {"--help"}
    wrong = [(at, option) for at, text in fixes() for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", text)
             if option not in known]  # fmt: skip
    assert not wrong
    assert len(fixes()) > 500


def test_every_command_in_a_text_has_a_known_verb_and_options() -> None:
    wrong, seen = [], 0
    for at, text in texts():
        for line in re.findall(r"(?:^ *|[`$;:] ?|^.{0,60}: )thrifty ([a-z][^`#;\n]*)", text, flags=re.M):
            words = [word.rstrip(":.)") for word in re.split(r",? or |, |\"", line)[0].split()]
            options = [word for word in words if word.startswith("--")]
            seen += 1
            if text != FORMAT and (words[0] not in VERBS or not options_of(words).issuperset(options)):
                wrong.append((at, line))
    assert not wrong
    assert seen > 100


def test_every_setting_of_a_fix_is_one_of_a_recipe() -> None:
    tables = {field.name for field in fields(Recipe)}
    of_recipes = [(at, text) for at, text in fixes() if "thrifty study" not in text]
    named = [(at, path) for at, text in of_recipes for path in re.findall(r"--set ([\w{}]+)[.=]", text)]
    assert [(at, path) for at, path in named if path not in tables] == []
    assert len(named) > 20


@pytest.mark.parametrize("option", ["--with", "--without"])
def test_techniques_that_a_fix_names_exist(option: str) -> None:
    named = [(at, name) for at, text in fixes() for name in re.findall(rf"{option} ([a-z_]+\.[a-z_.]*[a-z_])", text)]
    assert [(at, name) for at, name in named if name not in techniques.names()] == []
    assert option == "--without" or len(named) > 5
