"""A recipe put together in layers, each value remembering which layer it came from.

defaults  <  a recipe (a function's name or a TOML file)  <  --data, --budget, …  <  --with, --without  <  --set
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from thrifty import techniques
from thrifty.core.errors import UsageError, did_you_mean
from thrifty.core.mesh import USED_BY
from thrifty.core.plain_values import DEEPEST, parse_toml
from thrifty.core.recipe import Recipe
from thrifty.core.user_objects import UserObjects
from thrifty.core.user_sources import is_dataset_name, is_function_name
from thrifty.recipes.recipe_toml import recipe_from_data, recipe_to_data, technique_tables


@dataclass
class RecipeLayers:
    base: Recipe | None = None
    """A recipe that is a value already; the tables of a file have none below them."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Tables of the values above the base, which are checked once all are there."""
    origins: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    """The model's function, data and loss of the user's own, by the names that were typed."""

    @classmethod
    def above(cls, origin: str, recipe: Recipe) -> "RecipeLayers":
        """Layers above a recipe, all of whose values have this origin."""
        layers = cls(recipe)
        layers.origins = dict.fromkeys(layers.values(), origin)
        return layers

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
        if self.base is not None:
            self.base = self.base.without_objects("model") if key == "model" else self.base
            self.base = replace(self.base, **{key: type(getattr(self.base, key))()})
        self.changes.pop(key, None)
        self._forget(key)
        return self.override(origin, {key: table})

    def set(self, assignment: str) -> "RecipeLayers":
        """One `path=value`, the value in TOML; text needs no quotes."""
        path, equals, text = assignment.partition("=")
        if not equals or not path or path.count(".") > DEEPEST:
            raise UsageError(f"--set {assignment!r} is not path=value", fix="for example --set data.batch=16")
        return self.assign("--set", path, toml_value(text))

    def assign(self, origin: str, path: str, value: Any) -> "RecipeLayers":
        """Put a value above that of a path such as `data.batch`. Raises UsageError for the name of an object."""
        if path == "model.build" or path.split(".")[0] == "python":
            name = path.rpartition(".")[2].replace("build", "model").replace("python", "loss")
            fix = f"--{name.replace('_', '-')} package.module:name"
            raise UsageError(f"{path} names an object, which is passed and not set", fix)
        if path.startswith("budget."):  # its amounts exclude each other: the new one takes the place of the old
            return self.replace(origin, "budget", {path.removeprefix("budget."): value})
        return self.override(origin, _nested(path, value))

    def add_technique(self, words: str) -> "RecipeLayers":
        """One `name` or `name:key=value,key=value`."""
        name, settings = techniques.split_settings(words)
        return self.override("--with", {"techniques": _nested(name, toml_table(settings, words))})

    def drop_technique(self, name: str) -> "RecipeLayers":
        present = self._technique_names()
        name = name if name in present else techniques.full_name(name)
        if name not in present:
            raise UsageError(f"--without {name}: the recipe does not use it", fix=did_you_mean(name, present))
        if self.base is not None:
            kept = tuple(technique for technique in self.base.techniques if technique.name != name)
            self.base = replace(self.base, techniques=kept)
        *group, last = name.split(".")
        self._table(("techniques", *group)).pop(last, None)
        self._forget(f"techniques.{name}")
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
        sizes = toml_table(axes, axes, "--mesh", "")
        self.replace("--mesh", "mesh", sizes)
        for axis, size in sizes.items():
            claim, name = USED_BY.get(axis, ("", ""))
            present = [techniques.find(other) for other in self._technique_names()]
            if name and size != 1 and not any(claim in technique.claims for technique in present):
                self.override("--mesh", {"techniques": _nested(name, {})})
        return self

    def changed(self) -> dict[str, str]:
        """Return where each value that is not the default came from."""
        chosen = tuple(techniques.find(name)() for name in self._technique_names())
        values, default = self.values(), RecipeLayers(Recipe(techniques=chosen)).values()
        return {
            path: origin
            for path, origin in self.origins.items()
            if path not in default or values.get(path) != default[path]
        }

    def values(self) -> dict[str, Any]:
        """Each value by its path, as it was put there."""
        return (_values(recipe_to_data(self.base)) if self.base else {}) | _values(self.changes)

    def apply_model(self, model: str | None, arguments: Sequence[str] = ()) -> "RecipeLayers":
        """A preset, a folder, or the name of a function, whose arguments are `key=value`. What a recipe says of the
        same function stays; sizes of another model go with that."""
        present = self.values()
        if is_function_name(model):
            self.names["model"] = model or ""
            if present.get("model.build") != model:
                self.replace("--model", "model", {"build": model})
                self.override("--model", {"about": ""} if present.get("about") else {})
        elif model is not None and Path(model).is_dir():
            reinitialize = present.get("model.reinitialize", False)
            folder = str(Path(model).resolve())  # it also works from another folder, when the run is resumed there
            self.replace("--model", "model", {"folder": folder, "reinitialize": reinitialize})
        elif model is not None and present.get("model.build"):
            self.replace("--model", "model", {"preset": model})
        elif model is not None:
            self.override("--model", {"model": {"preset": model, "folder": ""}})
        for assignment in arguments:
            name, equals, text = assignment.partition("=")
            if not equals or not name.isidentifier():
                raise UsageError(f"--model-arg {assignment!r} is not key=value", fix="for example --model-arg width=64")
            self.override("--model-arg", {"model": {"arguments": {name: toml_value(text)}}})
        return self

    def apply_objects(self, data: str | None, held_out: str | None, loss: str | None) -> "RecipeLayers":
        """Data and a loss of the user's own by their names; or data by a path that exists or a known set, which also
        works from another folder, and an objective. Raises UsageError where one of data and held-out data is the
        user's own."""
        for name, text, section in (
            ("data", data, ("data", "source")),
            ("held_out", held_out, ("data", "held_out_source")),
            ("loss", loss, ("objective", "name")),
        ):
            path = text if not text or name == "loss" or not Path(text).exists() else str(Path(text).resolve())
            is_name = is_function_name if name == "loss" else is_dataset_name
            if path is not None and is_name(path):
                self.names[name] = path
            elif path is not None:
                self.override(f"--{name.replace('_', '-')}", {section[0]: {section[1]: path}})
                if name == "data":
                    self._drop_sources()
        if ("data" in self.names) != ("held_out" in self.names):
            raise UsageError(
                "data of your own need held-out data to be judged by, both by name",
                fix="--data package.module:name --held-out package.module:name",
            )
        return self

    def _drop_sources(self) -> None:
        """Leave out a mixture of sources, which would take the place of the one that was typed."""
        if self.base is not None:
            self.base = replace(self.base, data=replace(self.base.data, sources={}))
        self._table(("data",)).pop("sources", None)
        self._forget("data.sources")

    def recipe(self) -> Recipe:
        """The recipe with what `apply_model` and `apply_objects` named, which alone is imported."""
        recipe = recipe_from_data(self.changes, self.base)
        names = {name: text for name, text in self.names.items() if name != "model" or recipe.model.build == text}
        if not names:
            return recipe
        own, known = UserObjects.given(**names), recipe.objects
        passed = {name: getattr(own, name) for name in names}
        return replace(recipe, objects=replace(known, **passed, names={**known.names, **names}))

    def _technique_names(self) -> list[str]:
        below = [technique.name for technique in (self.base.techniques if self.base else ())]
        above = [name for name, _ in technique_tables(self.changes.get("techniques", {}))]
        return list(dict.fromkeys(below + above))

    def _forget(self, key: str) -> None:
        self.origins = {path: at for path, at in self.origins.items() if not f"{path}.".startswith(f"{key}.")}

    def _table(self, path: Sequence[str]) -> dict[str, Any]:
        table = self.changes
        for depth, name in enumerate(path, start=1):
            if ".".join(path[:depth]) in self.origins:
                raise UsageError(f"{'.'.join(path)} is set as a value and as a table")
            table = table.setdefault(name, {})
        return table


def _values(table: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Each value below a table by its path."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        values |= _values(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return values


def _nested(path: str, value: Any) -> dict[str, Any]:
    """`a.b` and a value as {"a": {"b": value}}."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def toml_value(text: str) -> Any:
    """A value as TOML has it; what is no TOML is text."""
    try:
        return parse_toml(f"value = {text}", f"--set {text[:80]!r}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def toml_table(settings: str, words: str, option: str = "--with", form: str = "name:") -> dict[str, Any]:
    """`lr=1e-3,betas=[0.9,0.95],moments=copy` as a table; bare words are text. Messages name the `option` with all its
    `words`, and the `form` of what stands before the table."""
    bare = r"""("[^"]*"|'[^']*')|=\s*(?!(?:true|false|inf|nan)\b)([A-Za-z_][\w.-]*)"""
    quoted = re.sub(bare, lambda found: found[1] or f'="{found[2]}"', settings)
    try:
        return parse_toml(f"table = {{{quoted}}}", f"{option} {words[:80]!r}")["table"]
    except tomllib.TOMLDecodeError:
        example = f"{option} {'optimizers.adamw:lr=1e-3' if form else 'KEY=1'}"
        raise UsageError(f"{option} {words!r} is not {form}key=value,key=value", f"for example {example}") from None
