"""The TOML spelling of a recipe. Reading what was written gives the same value."""

import os
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from thrifty import techniques
from thrifty.core.errors import UsageError
from thrifty.core.old_names import rename_recipe
from thrifty.core.plain_values import build, parse_toml, to_data
from thrifty.core.recipe import Recipe
from thrifty.core.secret_redaction import redact

LARGEST = 1_000_000
"""Bytes: a larger file is not a recipe."""


def recipe_to_data(recipe: Recipe) -> dict[str, Any]:
    """The recipe as tables without secrets; a technique's table stands under its dotted name.

    A path that exists stays as it is, whatever it looks like, and so does the name of an object: a run is resumed by
    them. What objects of the user's own take the place of is left out.
    """
    tables = to_data(recipe) | {"techniques": _nested((each.name, to_data(each)) for each in recipe.techniques)}
    replaced = {"preset", "folder", "reinitialize"} if recipe.model.build else set()
    tables["model"] = {name: value for name, value in tables["model"].items() if name not in replaced}
    if recipe.python.data:
        del tables["data"]["source"]
        if recipe.python.loss:
            del tables["objective"]
    shown = redact(tables, keep=os.path.exists)
    build = {"build": recipe.model.build} if recipe.model.build else {}
    return shown | {"python": tables["python"], "model": shown["model"] | build}


def _nested(chosen: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """A [techniques] table of techniques by their full names; raises UsageError where one is there twice."""
    tables: dict[str, Any] = {}
    for name, settings in chosen:
        *group, last = name.split(".")
        table = tables
        for part in group:
            table = table.setdefault(part, {})
        if last in table:
            raise UsageError(f"the recipe has {name!r} twice", fix=f"keep [techniques.{name}] alone")
        table[last] = settings
    return tables


def recipe_from_data(data: Mapping[str, Any], base: Recipe | None = None) -> Recipe:
    """The recipe of these tables, which with `base` have only what differs from that.

    Raises UsageError for unknown keys and techniques and for values of the wrong type, each with its path.
    """
    plain = {key: value for key, value in data.items() if key != "techniques"}
    chosen = {technique.name: technique for technique in (base.techniques if base else ())}
    for name, settings in technique_tables(data.get("techniques", {})):
        chosen[name] = build(techniques.find(name), settings, f"techniques.{name}", chosen.get(name))
    return replace(build(Recipe, plain, base=base), techniques=tuple(chosen.values()))


def technique_tables(table: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each technique named in a [techniques] table, by its full name, with its settings."""
    return _tables_below(table, "", techniques.names())


def _tables_below(table: Mapping[str, Any], prefix: str, known: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(table, Mapping):
        raise UsageError(f"techniques{'.' + prefix if prefix else ''} must be a table, not {table!r}")
    for key, value in table.items():
        name = f"{prefix}.{key}" if prefix else key
        if any(other.startswith(name + ".") for other in known) and name not in known:
            yield from _tables_below(value, name, known)
        else:
            yield techniques.full_name(name), value


def write_recipe(recipe: Recipe) -> str:
    return tomli_w.dumps(recipe_to_data(recipe))


def read_tables(path: Path) -> dict[str, Any]:
    """The tables of a recipe file, techniques by their full names; raises UsageError for what is no readable TOML."""
    tables = _read_toml(path)
    return tables | ({"techniques": _nested(technique_tables(tables["techniques"]))} if "techniques" in tables else {})


def _read_toml(path: Path) -> dict[str, Any]:
    if path.stat().st_size > LARGEST:
        raise UsageError(f"{path} has {path.stat().st_size} bytes: too large for a recipe", fix="give a recipe file")
    try:
        return parse_toml(path.read_text(encoding="utf-8"), str(path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}", fix="correct the file there, or write it again") from None


def read_stored_tables(path: Path) -> dict[str, Any]:
    """The tables of the recipe that a run folder keeps, whatever version wrote it, by the names of today."""
    try:
        return rename_recipe(_read_toml(path))
    except UsageError as error:
        fix = f"rm {shlex.quote(str(path))}: the recipe in the newest checkpoint is then used, if there is one"
        raise UsageError(error.what, fix) from None


def read_recipe(path: Path) -> Recipe:
    """The recipe that a run folder keeps."""
    return recipe_from_data(read_stored_tables(path))
