"""Recipes as TOML. Writing and reading a recipe yields an equal recipe."""

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
"""Maximum size of a recipe file in bytes."""


def recipe_to_data(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as tables without secrets, with techniques under their dotted names.

    Existing paths and names of objects are not redacted, because resuming a run requires them. Settings that are
    replaced by a user's objects are left out.
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
    """Return a nested [techniques] table from pairs of full name and settings. Raises UsageError for a duplicate."""
    tables: dict[str, Any] = {}
    for name, settings in chosen:
        *group, last = name.split(".")
        table = tables
        for part in group:
            table = table.setdefault(part, {})
        if last in table:
            raise UsageError(f"the recipe has the technique {name!r} twice", fix=f"keep only one [techniques.{name}]")
        table[last] = settings
    return tables


def recipe_from_data(data: Mapping[str, Any], base: Recipe | None = None) -> Recipe:
    """Return the recipe described by tables. Values that are not in the tables come from `base` or are defaults.

    Raises UsageError with the path for an unknown key or technique, or a value of the wrong type.
    """
    plain = {key: value for key, value in data.items() if key != "techniques"}
    chosen = {technique.name: technique for technique in (base.techniques if base else ())}
    for name, settings in technique_tables(data.get("techniques", {})):
        chosen[name] = build(techniques.find(name), settings, f"techniques.{name}", chosen.get(name))
    return replace(build(Recipe, plain, base=base), techniques=tuple(chosen.values()))


def technique_tables(table: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the full name and the settings of each technique in a [techniques] table."""
    return _tables_below(table, "", techniques.names())


def _tables_below(table: Mapping[str, Any], prefix: str, known: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(table, Mapping):
        path = f"techniques.{prefix}" if prefix else "techniques"
        raise UsageError(f"{path} must be a table, not {table!r}", fix=f"write [{path}] and its keys below")
    for key, value in table.items():
        name = f"{prefix}.{key}" if prefix else key
        if any(other.startswith(name + ".") for other in known) and name not in known:
            yield from _tables_below(value, name, known)
        else:
            yield techniques.full_name(name), value


def write_recipe(recipe: Recipe) -> str:
    return tomli_w.dumps(recipe_to_data(recipe))


def read_tables(path: Path) -> dict[str, Any]:
    """Return the tables of a recipe file, with techniques by their full names. Raises UsageError for invalid TOML."""
    tables = _read_toml(path)
    return tables | ({"techniques": _nested(technique_tables(tables["techniques"]))} if "techniques" in tables else {})


def _read_toml(path: Path) -> dict[str, Any]:
    if path.stat().st_size > LARGEST:
        raise UsageError(
            f"{str(path)!r} has {path.stat().st_size} bytes, but a recipe has at most {LARGEST}",
            fix="pass a recipe file",
        )
    try:
        return parse_toml(path.read_text(encoding="utf-8"), str(path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        fix = "correct this line of the file" if path.suffix == ".toml" else f"--data {path}, if it is your data"
        raise UsageError(f"{str(path)!r} is not TOML: {error}", fix) from None


def read_stored_tables(path: Path) -> dict[str, Any]:
    """Return the tables of a recipe in a run folder. Names from earlier versions become current names."""
    try:
        return rename_recipe(_read_toml(path))
    except UsageError as error:
        fix = f"rm {shlex.quote(str(path))}: the recipe in the newest checkpoint is then used, if there is one"
        raise UsageError(error.what, fix) from None


def read_recipe(path: Path) -> Recipe:
    """Return the recipe of a run folder."""
    return recipe_from_data(read_stored_tables(path))
