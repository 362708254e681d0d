"""The TOML spelling of a recipe. Reading what was written gives the same value."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from thrifty import techniques
from thrifty.core.errors import UsageError
from thrifty.core.old_names import recipe_today
from thrifty.core.plain_values import build, to_data
from thrifty.core.recipe import Recipe

LARGEST = 1_000_000
"""Bytes: a larger file is not a recipe."""


def recipe_to_data(recipe: Recipe) -> dict[str, Any]:
    """The recipe as tables; a technique's table stands under its dotted name."""
    data = to_data(recipe)
    data["techniques"] = {}
    for technique in recipe.techniques:
        *group, last = technique.name.split(".")
        table = data["techniques"]
        for name in group:
            table = table.setdefault(name, {})
        table[last] = to_data(technique)
    return data


def recipe_from_data(data: Mapping[str, Any], base: Recipe | None = None) -> Recipe:
    """The recipe of these tables, which with `base` have only what differs from that.

    Raises UsageError for unknown keys and techniques and for values of the wrong type, each with its path.
    """
    plain = {key: value for key, value in data.items() if key != "techniques"}
    chosen = {technique.name: technique for technique in (base.techniques if base else ())}
    for name, settings in technique_tables(with_full_names(data.get("techniques", {}))):
        chosen[name] = build(techniques.find(name), settings, f"techniques.{name}", chosen.get(name))
    return replace(build(Recipe, plain, base=base), techniques=tuple(chosen.values()))


def with_full_names(table: Mapping[str, Any]) -> dict[str, Any]:
    """A [techniques] table in which each technique has its full name, and what a customary name implies."""
    full: dict[str, Any] = {}
    for written, settings in technique_tables(table):
        name, implied = techniques.resolve(written)
        *group, last = name.split(".")
        inner = full
        for part in group:
            inner = inner.setdefault(part, {})
        if last in inner:
            raise UsageError(f"techniques.{written} is {name}, which is there already", fix="keep one of the two")
        inner[last] = {**implied, **settings} if isinstance(settings, Mapping) else settings
    return full


def technique_tables(table: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each technique named in a [techniques] table, with its settings."""
    return _tables_below(table, "", techniques.names())


def _tables_below(table: Mapping[str, Any], prefix: str, known: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(table, Mapping):
        raise UsageError(f"techniques{'.' + prefix if prefix else ''} must be a table, not {table!r}")
    for key, value in table.items():
        name = f"{prefix}.{key}" if prefix else key
        if any(other.startswith(name + ".") for other in known) and name not in known:
            yield from _tables_below(value, name, known)
        else:
            yield name, value


def write_recipe(recipe: Recipe) -> str:
    return tomli_w.dumps(recipe_to_data(recipe))


def read_tables(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, in the names of today if a run folder keeps it.

    Raises UsageError for what is no readable TOML.
    """
    if path.stat().st_size > LARGEST:
        raise UsageError(f"{path} has {path.stat().st_size} bytes: too large for a recipe")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    return recipe_today(tables) if (path.parent / "environment.json").is_file() else tables


def read_recipe(path: Path) -> Recipe:
    return recipe_from_data(read_tables(path))
