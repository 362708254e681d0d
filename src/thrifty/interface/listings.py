"""`list`: print the names that recipes and commands accept, one line per name.

Techniques are listed without importing torch, which takes seconds.
"""

import ast
import sys
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from thrifty import techniques
from thrifty.core.card import read_card
from thrifty.core.errors import UsageError, refuse_unknown
from thrifty.reporting.printed_result import PrintedResult, lines, open_table

Kind = Literal["techniques", "recipes", "studies", "presets", "objectives", "designs"]
WIDTH = 120
"""Number of characters per printed line."""


class Listing(PrintedResult, dict[str, str]):
    """Names with one line of description each."""

    def as_dict(self) -> Any:
        return [{"name": name, "about": about} for name, about in self.items()]

    def __rich__(self) -> RenderableType:
        return _columns(self)


class TechniqueListing(Listing):
    """Techniques grouped by their goals."""

    def __rich__(self) -> RenderableType:
        groups: dict[str, dict[str, str]] = {}
        for name, about in self.items():
            groups.setdefault(name.rpartition(".")[0], {})[name] = about
        width = max(map(len, self), default=0)
        printed = [[f"\n{_goal(group)}", _columns(rows, width)] for group, rows in groups.items()]
        return lines(*chain(*printed))


def _columns(rows: Mapping[str, str], width: int = 0) -> Table:
    """Return names and descriptions. Descriptions wrap to the terminal."""
    width = width or max(map(len, rows), default=0)
    table = open_table(show_header=False)
    table.add_column(min_width=width, overflow="fold")
    table.add_column(max_width=max(WIDTH - width - 2, 1))
    for row in rows.items():
        table.add_row(*map(escape, row))
    return table


def list_names(kind: Kind = "techniques", *, search: str = "") -> Listing:
    """List techniques, recipes, studies, presets, objectives or accelerator designs, with one line per name.

    `search` selects entries whose name, line or card contains all words of `search`; case is ignored. Code of
    third-party techniques is not run. Raises UsageError if `kind` is unknown or nothing matches.

    Example::

        print(thrifty.list("recipes"))
        print(thrifty.list(search="activation memory"))
        "adapters.lora" in thrifty.list()
    """
    refuse_unknown("there is no list of", kind, get_args(Kind))
    rows = _KINDS[kind]()
    words = search.lower().split()
    cards = {name: _card(name) for name in rows} if words and kind == "techniques" else {}
    texts = {name: f"{name} {about} {cards.get(name, '')} {_aliases(name)}".lower() for name, about in rows.items()}
    kept = {name: about for name, about in rows.items() if all(word in texts[name] for word in words)}
    if not kept:
        raise UsageError(f"no {kind} match {search!r}", fix=f"thrifty list {kind}")
    return TechniqueListing(kept) if kind == "techniques" else Listing(kept)


def _techniques() -> Mapping[str, str]:
    return {name: _about(name) for name in techniques.names()}


def _about(name: str) -> str:
    """Return the description line of a technique from its source file."""
    if techniques.source_file(name) is None:
        outside = techniques.third_party().get(name)
        return f"from the package {outside.dist.name if outside.dist else outside.value}" if outside else "no .py file"
    return read_card(_card(name)).effect or "no description"


def _card(name: str) -> str:
    """Return the docstring of a technique without running its file, because the file may be third-party code."""
    file = techniques.source_file(name)
    try:
        if file is None or not file.is_file():
            raise OSError("not a regular file")
        source = file.read_bytes()
        docstring = source[: source.find(b'"""', 3) + 3]  # parsing whole files takes a second
        is_plain = source.startswith(b'"""') and len(docstring) > 3
        return ast.get_docstring(ast.parse(docstring if is_plain else source, str(file))) or ""
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"cannot be read: {type(error).__name__}: {error} ({file})"


def _aliases(name: str) -> str:
    return " ".join(alias for alias, meant in techniques.ALIASES.items() if meant == name)


def _goal(group: str) -> str:
    """Return the heading of a technique group: the first line of its package docstring."""
    package = Path(techniques.__file__).parent / group / "__init__.py"
    docstring = ast.get_docstring(ast.parse(package.read_bytes())) if group and package.is_file() else ""
    return (docstring or group or "Compilation").partition("\n")[0]


def _recipes() -> Mapping[str, str]:
    from thrifty.recipes import RECIPES

    return {name: make().about for name, make in RECIPES.items()}


def _studies() -> Mapping[str, str]:
    from thrifty.experiments import studies

    made = map(studies.make, studies.names())
    return {study.name: f"{study.about} About {study.minutes:g} min." for study in made}


def _presets() -> Mapping[str, str]:
    import torch

    from thrifty.models.families import assemble
    from thrifty.models.model_presets import PRESETS

    rows = {}
    for name, shape in PRESETS.items():
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in assemble(shape).parameters())
        ends = f"vocabulary {shape.vocabulary:,}"
        if shape.style == "clip":
            ends = f"images of {shape.image} pixels in patches of {shape.patch}, captions of {shape.length} tokens"
        if shape.style == "mae":
            ends = f"a decoder of {shape.decoder_depth}, images of {shape.image} pixels in patches of {shape.patch}"
        if shape.style == "vit":
            ends = f"images of {shape.image} pixels in patches of {shape.patch}, {shape.vocabulary:,} labels"
        rows[name] = f"{shape.depth} blocks, width {shape.width}, {ends}, {parameters:,} parameters"
    return rows


def _objectives() -> Mapping[str, str]:
    from thrifty.objectives import OBJECTIVES

    return {name: read_card(sys.modules[make.__module__].__doc__).effect for name, make in OBJECTIVES.items()}


def _designs() -> Mapping[str, str]:
    from thrifty.simulators.accelerator.accelerator_file import find_machine, machine_names

    return {name: find_machine(name).about for name in machine_names()}


_KINDS: Mapping[Kind, Callable[[], Mapping[str, str]]] = {
    "techniques": _techniques,
    "recipes": _recipes,
    "studies": _studies,
    "presets": _presets,
    "objectives": _objectives,
    "designs": _designs,
}
