"""`list`: print the names that recipes and commands accept, one line per name. Listing imports no torch."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any, get_args

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from thrifty import techniques
from thrifty.core.card import read_card
from thrifty.core.errors import UsageError, refuse_unknown
from thrifty.experiments.evidence import Evidence, evidence_by_technique
from thrifty.interface.cards import NamedCard
from thrifty.interface.catalog import Kind, catalog
from thrifty.interface.technique_profiles import goal_of, profile_named
from thrifty.reporting.printed_result import PrintedResult, lines, open_table

WIDTH = 120
"""Number of characters per printed line."""


class Listing(PrintedResult, dict[str, str]):
    """Names with one line of description each. As JSON it has whole cards."""

    kind: Kind = "techniques"

    def as_dict(self) -> Sequence[Mapping[str, Any]]:
        """Return each entry as `show` returns it, with the added key "about"."""
        entries = catalog()[self.kind]
        return [
            NamedCard(self.kind.removesuffix("s"), name, **entries[name]).as_dict()
            if "card" in entries[name]
            else {"name": name, "about": about}
            for name, about in self.items()
        ]

    def __rich__(self) -> RenderableType:
        return _columns(self)


class TechniqueListing(Listing):
    """Techniques grouped by their goals."""

    def as_dict(self) -> Sequence[Mapping[str, Any]]:
        """Return each card with its settings and evidence. Code of third parties is not run: their cards have no
        settings.
        """
        evidence = evidence_by_technique()
        return [{"name": name, "about": about, **_details(name, evidence)} for name, about in self.items()]

    def __rich__(self) -> RenderableType:
        goals: dict[str, dict[str, str]] = {}
        for name, about in self.items():
            goals.setdefault(goal_of(name), {})[name] = about
        width = max(map(len, self), default=0)
        printed = [[f"\n{goal}", _columns(rows, width)] for goal, rows in goals.items()]
        return lines(*chain(*printed))


def _details(name: str, evidence: Mapping[str, Evidence]) -> Mapping[str, Any]:
    if name in catalog()["techniques"]:
        return replace(profile_named(name), evidence=evidence.get(name, Evidence())).as_dict()
    card = _card(name)
    return {"card": card, "goal": goal_of(name), **asdict(read_card(card))}


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
    is_techniques = kind == "techniques"
    rows = {name: _about(name) for name in techniques.names()} if is_techniques else _lines(kind)
    words = search.lower().split()
    cards = {name: _card(name) for name in rows} if words and is_techniques else {}
    texts = {name: f"{name} {about} {cards.get(name, '')} {_aliases(name)}".lower() for name, about in rows.items()}
    kept = {name: about for name, about in rows.items() if all(word in texts[name] for word in words)}
    if not kept:
        raise UsageError(f"no {kind} match {search!r}", fix=f"thrifty list {kind}")
    listing = TechniqueListing(kept) if is_techniques else Listing(kept)
    listing.kind = kind
    return listing


def _lines(kind: Kind) -> Mapping[str, str]:
    return {name: entry["about"] for name, entry in catalog()[kind].items()}


def _about(name: str) -> str:
    """Return the description line of a technique."""
    if techniques.source_file(name) is None:
        outside = techniques.third_party().get(name)
        return f"from the package {outside.dist.name if outside.dist else outside.value}" if outside else "no .py file"
    return read_card(_card(name)).effect or "no description"


def _card(name: str) -> str:
    """Return the card of a technique without running its file, because the file may be third-party code."""
    if name in catalog()["techniques"]:
        return catalog()["techniques"][name]["card"]
    file = techniques.source_file(name)
    if file is None:
        return ""  # an entry point
    try:
        if not file.is_file():
            raise OSError("not a regular file")
        return ast.get_docstring(ast.parse(file.read_bytes(), str(file))) or ""
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"cannot be read: {type(error).__name__}: {error} ({file})"


def _aliases(name: str) -> str:
    return " ".join(alias for alias, meant in techniques.ALIASES.items() if meant == name)
