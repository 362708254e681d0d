"""A recipe put together in layers, each value remembering which layer it came from.

defaults  <  a recipe (a function's name or a TOML file)  <  --data, --budget, …  <  --with, --without  <  --set
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thrifty import techniques
from thrifty.core.errors import UsageError, did_you_mean
from thrifty.core.mesh import USED_BY
from thrifty.core.recipe import Recipe
from thrifty.recipes.recipe_toml import recipe_from_data, recipe_to_data, technique_tables


@dataclass
class RecipeLayers:
    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def override(self, origin: str, data: Mapping[str, Any], path: tuple[str, ...] = ()) -> "RecipeLayers":
        """Put values above those that are there, table by table."""
        for key, value in data.items():
            here = (*path, key)
            if isinstance(value, Mapping):
                self._table(here)
                self.override(origin, value, here)
            else:
                self._table(path)[key] = value
                self.origins[".".join(here)] = origin
        return self

    def replace(self, origin: str, key: str, table: Mapping[str, Any]) -> "RecipeLayers":
        """Put a whole table in place of what is there: values that exclude each other must not be mixed."""
        self.data.pop(key, None)
        self.origins = {path: where for path, where in self.origins.items() if not path.startswith(key + ".")}
        return self.override(origin, {key: table})

    def set(self, assignment: str) -> "RecipeLayers":
        """One `path=value`, the value in TOML; text needs no quotes."""
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise UsageError(f"--set {assignment!r} is not path=value", fix="for example --set data.batch=16")
        if path.startswith("budget."):  # its amounts exclude each other: the new one takes the place of the old
            return self.replace("--set", "budget", {path.removeprefix("budget."): toml_value(text)})
        return self.override("--set", _nested(path, toml_value(text)))

    def add_technique(self, words: str) -> "RecipeLayers":
        """One `name` or `name:key=value,key=value`."""
        name, _, settings = words.partition(":")
        techniques.find(name)
        return self.override("--with", {"techniques": _nested(name, toml_table(settings, words))})

    def drop_technique(self, name: str) -> "RecipeLayers":
        present = dict(technique_tables(self.data.get("techniques", {})))
        if name not in present:
            raise UsageError(f"--without {name}: the recipe does not use it", fix=did_you_mean(name, present))
        *group, last = name.split(".")
        del self._table(("techniques", *group))[last]
        self.origins = {path: at for path, at in self.origins.items() if not path.startswith(f"techniques.{name}.")}
        return self

    def apply_changes(
        self, removals: Sequence[str], additions: Sequence[str], assignments: Sequence[str]
    ) -> "RecipeLayers":
        """What --without, --with and --set say, in this order: a technique can be taken out and put in anew."""
        for name in removals:
            self.drop_technique(name)
        for words in additions:
            self.add_technique(words)
        for assignment in assignments:
            self.set(assignment)
        return self

    def apply_mesh(self, axes: str) -> "RecipeLayers":
        """`tensor=2,pipeline=2`: the sizes of the mesh, and the techniques that its axes need and that are missing."""
        sizes = toml_table(axes, f"--mesh {axes}")
        self.replace("--mesh", "mesh", sizes)
        for axis, size in sizes.items():
            claim, name = USED_BY.get(axis, ("", ""))
            present = [techniques.find(other) for other, _ in technique_tables(self.data.get("techniques", {}))]
            if name and size != 1 and not any(claim in technique.claims for technique in present):
                self.override("--mesh", {"techniques": _nested(name, {})})
        return self

    def changed(self) -> dict[str, str]:
        """Return where each value that is not the default came from."""
        names = [name for name, _ in technique_tables(self.data.get("techniques", {}))]
        default = recipe_to_data(Recipe(techniques=tuple(techniques.find(name)() for name in names)))

        def is_default(path: str) -> bool:
            mine, theirs = self.data, default
            for key in path.split("."):
                if not isinstance(theirs, Mapping) or key not in theirs:
                    return False
                mine, theirs = mine[key], theirs[key]
            return mine == theirs

        return {path: origin for path, origin in self.origins.items() if not is_default(path)}

    def recipe(self) -> Recipe:
        return recipe_from_data(self.data)

    def _table(self, path: Sequence[str]) -> dict[str, Any]:
        table = self.data
        for name in path:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise UsageError(f"{'.'.join(path)} is set as a value and as a table")
        return table


def _nested(path: str, value: Any) -> dict[str, Any]:
    """`a.b` and a value as {"a": {"b": value}}."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def toml_value(text: str) -> Any:
    """A value as TOML has it; what is no TOML is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def toml_table(settings: str, words: str) -> dict[str, Any]:
    """`lr=1e-3,betas=[0.9,0.95],moments=copy` as a table; bare words are text."""
    bare = r"""("[^"]*"|'[^']*')|=\s*(?!(?:true|false|inf|nan)\b)([A-Za-z_][\w.-]*)"""
    quoted = re.sub(bare, lambda found: found[1] or f'="{found[2]}"', settings)
    try:
        return tomllib.loads(f"table = {{{quoted}}}")["table"]
    except tomllib.TOMLDecodeError:
        raise UsageError(
            f"--with {words!r} is not name:key=value,key=value", fix="for example --with optimizers.adamw:lr=1e-3"
        ) from None
