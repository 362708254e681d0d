"""Names in documentation pages exist: Python names, options, settings, techniques with their settings, source files."""

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import reduce
from pathlib import Path

import click
import pytest

import thrifty
from generator.recipe_reference import RECIPE_TABLES
from thrifty import recipes, techniques
from thrifty.cli.main import thrifty as command_line

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if "generated" not in page.parts)
FOREIGN = {"--max-restarts", "--nnodes", "--nproc-per-node", "--local-dir"}
"""Options of torchrun and of hf."""


def spans(page: Path) -> list[str]:
    """Return the code of a page: blocks, and code in a line, but not the names of a peer library in a first column."""
    text = page.read_text(encoding="utf-8")
    if page.parent.name == "coming_from":
        text = re.sub(r"^\| .*? \| ", "", text, flags=re.M)
    blocks = re.findall(r"^```(?:bash|python)\n(.*?)^```", text, flags=re.M | re.S)
    return blocks + re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


def options(command: click.Command) -> set[str]:
    context = click.Context(command)
    own = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    names = command.list_commands(context) if isinstance(command, click.Group) else ()
    return own.union(*(options(below) for name in names if (below := command.get_command(context, name))))


OPTIONS = options(command_line) | FOREIGN | {"--help"}
SETTINGS = {f"{table}.{field.name}" for table, kind in RECIPE_TABLES.items() for field in fields(kind)}
RECIPES = {name: build() for name, build in recipes.RECIPES.items()}
TRAINING = ("train", "check", "explain", "estimate", "plan", "compare", "sweep", "lottery")
TABLE = "|".join(RECIPE_TABLES).replace(".", r"\.")


def wrong_words(line: str) -> Iterator[str]:
    """Yield the options of a command that its verb does not have, and a recipe without data."""
    words = line.partition(" # ")[0].split()
    command: click.Command = command_line
    for word in words[1:]:
        below = command.get_command(click.Context(command), word) if isinstance(command, click.Group) else None
        if below is None:
            break
        command = below
    known = options(command) | {"--help"}
    yield from (word for word in words if re.match(r"--[a-z]", word) and word.partition("=")[0] not in known)
    verb, recipe = words[1:3] if len(words) > 2 else ("", "")
    if verb in TRAINING and recipe in RECIPES and not ("--data" in words or RECIPES[recipe].data.source):
        yield f"{recipe} without --data"


def unknown_names(code: str) -> Iterator[str]:
    """Yield the names of a span of code that Thrifty does not have."""
    lines = code.replace("\\\n", " ").splitlines()
    yield from (word for line in lines if line.startswith("thrifty ") for word in wrong_words(line))
    yield from (option for option in re.findall(r"(?<!\S)--[a-z][a-z-]+", code) if option not in OPTIONS)
    for name in re.findall(r"\bth\.([a-zA-Z_.]+[a-zA-Z_])", code):
        try:
            reduce(getattr, name.split("."), thrifty)
        except AttributeError:
            yield f"th.{name}"
    if re.match(rf"(--set )?({TABLE})\.\w", code) and not re.search(r"\.(md|py|json|txt|csv)\b", code):
        paths = re.findall(rf"(?<![\w.])(?:{TABLE})\.[a-z_.]*[a-z_]", code)
        yield from (path for path in paths if path not in SETTINGS and not path.startswith("model.arguments."))
    for name, settings in re.findall(r"--with(?:out)? ([a-z][a-z0-9_.]+)(?::(\S+))?", code):
        known = {field.name for field in fields(techniques.find(name))}  # raises UsageError for an unknown name
        yield from (f"{name}:{key}" for key in re.findall(r"(?:^|,)(\w+)=", settings) if key not in known)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_names_on_a_page_exist(page: Path) -> None:
    assert [name for code in spans(page) for name in unknown_names(code)] == []


def test_source_files_on_pages_exist() -> None:
    named = {
        path
        for page in PAGES
        for span in spans(page)
        for path in re.findall(r"^(?:src/thrifty/)?([a-z_/]+\.py)$", span)
    }
    assert len(named) > 15
    assert [path for path in named if "/" in path and not (ROOT / "src/thrifty" / path).is_file()] == []


@pytest.mark.parametrize(
    "code",
    [
        "thrifty train text --bacth 8",
        "th.trian(model)",
        "--set data.bacth=8",
        "--with lora:rnak=8",
        "data.none",
        "thrifty sample NAME --variant x",
        "thrifty train mass --lr 1e-3",
    ],
)
def test_an_unknown_name_is_found(code: str) -> None:
    assert [*unknown_names(code)]


@pytest.mark.parametrize(
    "code", ["--set data.batch=8", "th.datasets.look", "--with lora:rank=8,alpha=16", "data.augment.flip"]
)
def test_a_known_name_is_accepted(code: str) -> None:
    assert [*unknown_names(code)] == []
