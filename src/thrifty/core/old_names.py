"""Present names for old names in stored files, from `old_names.toml`.

Code that reads stored run folders, recipes and results replaces old names. All other code uses only present names. If a
user types an old name, the error shows the present name.
"""

import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

_TABLES = tomllib.loads((files("thrifty.core") / "old_names.toml").read_text(encoding="utf-8"))
TECHNIQUES: dict[str, str] = _TABLES["techniques"]
SETTINGS: dict[str, dict[str, str]] = _TABLES["settings"]
"""Renamed settings of each technique, by the technique's present name."""
OBJECTIVES: dict[str, str] = _TABLES["objectives"]
VALUES: dict[str, dict[str, str]] = {"objective.name": OBJECTIVES, **_TABLES["values"]}
GONE: dict[str, str] = _TABLES["gone"]
"""Removed settings, each with the only value that stored files may have. Any other value is refused as unknown."""
RECIPE_KEYS: dict[str, dict[str, str]] = _TABLES["recipe_keys"]
COMPARISON_KEYS: dict[str, str] = _TABLES["comparison_keys"]

_OLD_TECHNIQUES = {new: old for old, new in TECHNIQUES.items()}


def order_key(name: str) -> str:
    """Return the sort key of a technique within its stage: its oldest name, so that a rename changes no run."""
    return _OLD_TECHNIQUES.get(name, name)


def new_key(path: str) -> str:
    """Return the present name of the last part of a recipe's dotted path."""
    return _renamed(tuple(path.split(".")))[-1]


def rename_origins(origins: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the keys of `origins`: dotted recipe paths, whose values are the origins of settings."""
    return {".".join(_renamed(tuple(path.split(".")))): origin for path, origin in origins.items()}


def rename_tensor(name: str) -> str:
    """Rename a tensor of a checkpoint: `techniques/NAME/…` contains the name of its technique."""
    kind, _, rest = name.partition("/")
    technique, slash, tensor = rest.partition("/")
    return f"techniques/{_today(technique)}{slash}{tensor}" if kind == "techniques" else name


def rename_scalars(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Rename techniques in the change log, and names in the recipe, of a checkpoint's scalars."""
    renamed = {**scalars, "log": rename_techniques(scalars["log"])} if "log" in scalars else dict(scalars)
    if isinstance(recipe := scalars.get("recipe"), Mapping):
        renamed["recipe"] = rename_recipe(recipe)
    return renamed


def rename_techniques(value: Any) -> Any:
    """Rename, in a stored JSON value, each string and key that equals the old name of a technique."""
    if isinstance(value, Mapping):
        return {TECHNIQUES.get(key, key): rename_techniques(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rename_techniques(inner) for inner in value]
    return TECHNIQUES.get(value, value) if isinstance(value, str) else value


def rename_comparison(data: Mapping[str, Any]) -> dict[str, Any]:
    """Rename keys, techniques, and the contents of recipes, in a stored comparison. Labels stay unchanged."""
    renamed = {**data, "changes": {label: rename_techniques(roles) for label, roles in data.get("changes", {}).items()}}
    for part in renamed.keys() & {"definition", "outcome"}:
        renamed[part] = _rekeyed(renamed[part], COMPARISON_KEYS)
    if "runs" in renamed:
        renamed["runs"] = [_rekeyed(run, COMPARISON_KEYS) for run in renamed["runs"]]
    if isinstance(variants := renamed.get("definition", {}).get("variants"), Mapping):
        recipes = {label: rename_recipe(recipe) for label, recipe in variants.items()}
        renamed["definition"] = {**renamed["definition"], "variants": recipes}
    return renamed


def _rekeyed(table: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in table.items()}


def rename_cases(cases: Mapping[str, Any]) -> dict[str, Any]:
    """Rename settings of block-sparse attention in the cases of a stored study."""
    keys = SETTINGS["attention.block_sparse"]
    return {
        label: {**case, "settings": {keys.get(key, key): value for key, value in case["settings"].items()}}
        if case.get("method") == "block-sparse"
        else case
        for label, case in cases.items()
    }


def rename_recipe(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Rename techniques, settings, keys and the objective in the tables of a stored recipe."""
    renamed: dict[str, Any] = {}
    for path, value in _leaves(tables, ()):
        *groups, key = path = _renamed(path)
        table: Any = renamed
        for name in groups:
            table = table.setdefault(name, {}) if isinstance(table, dict) else None
        # anything but a table comes from a damaged file, which its reader refuses
        if isinstance(table, dict) and GONE.get(".".join(path), ...) != value:
            table[key] = VALUES.get(".".join(path), {}).get(value, value) if isinstance(value, str) else value
    return renamed


def _renamed(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the renamed path of a value or an empty table in a recipe."""
    if path[0] == "techniques" and len(path) >= 3:
        path = ("techniques", *_today(".".join(path[1:3])).split("."), *path[3:])
    table = ".".join(path[:-1])
    keys = SETTINGS.get(table.removeprefix("techniques."), {}) | RECIPE_KEYS.get(table, {})
    return (*path[:-1], keys.get(path[-1], path[-1]))


def _leaves(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _today(technique: str) -> str:
    return TECHNIQUES.get(technique, technique)
