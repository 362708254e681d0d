"""Recipes composed in layers, with the origin of each value.

defaults  <  a recipe (a function's name or a TOML file)  <  --data, --budget, …  <  --with, --without  <  --set
"""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from thrifty import techniques
from thrifty.core.claims import Claim
from thrifty.core.errors import UsageError, did_you_mean
from thrifty.core.mesh import USED_BY
from thrifty.core.plain_values import DEEPEST, parse_toml
from thrifty.core.recipe import Recipe
from thrifty.core.user_objects import UserObjects
from thrifty.core.user_sources import is_dataset_name, is_function_name
from thrifty.data.catalogue import folder_of_model
from thrifty.recipes.recipe_toml import recipe_from_data, recipe_to_data, technique_tables

AMOUNTS = ("budget.steps", "budget.tokens", "budget.epochs", "budget.seconds")
"""Settings of a budget that exclude each other."""

PRETRAINED = "pretrained model"
"""Origin of a learning rate that replaces the one of a recipe for a new model."""
FINE_TUNING_RATE, ADAPTER_RATE = 5e-5, 5e-4
"""Learning rates of AdamW for all weights of a pretrained model, and for adapters, which need about ten times more."""


def fine_tuning_rate(names: Iterable[str]) -> float:
    """Return AdamW's learning rate for a pretrained model with the techniques of these names."""
    return ADAPTER_RATE if any(name.startswith("adapters.") for name in names) else FINE_TUNING_RATE


@dataclass
class RecipeLayers:
    """A base recipe, and changes of its values with their origins."""

    base: Recipe | None = None
    """Lowest layer; None if the lowest layer is a file, whose tables are then in `changes`."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Tables of the values above the base. The method `recipe` checks them."""
    origins: dict[str, str] = field(default_factory=dict)
    """Name of the layer that set each value, by path."""
    names: dict[str, str] = field(default_factory=dict)
    """Names "package.module:name" of the user's model function, data and loss, as typed."""
    added: set[str] = field(default_factory=set)
    """Names of the techniques that were added to the recipe."""
    replaced: dict[str, str] = field(default_factory=dict)
    """Name of the added technique that replaces a technique of the recipe, by the name of the latter."""
    is_now_pretrained: bool = False
    """True if the recipe was written for a new model, and its model is now pretrained."""

    @classmethod
    def above(cls, origin: str, recipe: Recipe) -> "RecipeLayers":
        """Return layers above a recipe. All values of the recipe have the given origin."""
        layers = cls(recipe)
        layers.origins = dict.fromkeys(layers.values(), origin)
        return layers

    def override(self, origin: str, data: Mapping[str, Any], path: tuple[str, ...] = ()) -> "RecipeLayers":
        """Change values in a new layer called `origin`. Tables of `data` change only the values that they contain."""
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
        """Replace a whole table, as required for tables whose values exclude each other."""
        if self.base is not None:
            self.base = self.base.without_objects("model") if key == "model" else self.base
            self.base = replace(self.base, **{key: type(getattr(self.base, key))()})
        self.changes.pop(key, None)
        self._forget(key)
        return self.override(origin, {key: table})

    def set(self, assignment: str) -> "RecipeLayers":
        """Set `path=value`. The value is TOML; text requires no quotes."""
        path, equals, text = assignment.partition("=")
        if not equals or not path or path.count(".") > DEEPEST:
            raise UsageError(f"--set {assignment!r} is not path=value", fix="for example --set data.batch=16")
        value = toml_value(text)
        word = path.removeprefix("techniques.")
        if isinstance(value, bool) and techniques.is_name(word):
            fix = f"--with {word}" if value else f"--without {word}"
            raise UsageError(f"--set {assignment}: {word} is a technique, not a setting", fix)
        return self.assign("--set", path, value)

    def assign(self, origin: str, path: str, value: Any) -> "RecipeLayers":
        """Set the value of a path such as `data.batch`. Raises UsageError if the path names a Python object."""
        if path == "model.build" or path.split(".")[0] == "python":
            name = path.rpartition(".")[2].replace("build", "model").replace("python", "loss")
            fix = f"--{name.replace('_', '-')} package.module:name"
            raise UsageError(f"--set {path!r} is not possible: the value is a Python object", fix)
        if path in AMOUNTS:  # a budget has one amount, so the new amount replaces the old one
            return self.replace(origin, "budget", {path.removeprefix("budget."): value})
        return self.override(origin, _nested(path, value))

    def add_technique(self, words: str) -> "RecipeLayers":
        """Add a technique `name` or `name:key=value,key=value`. If the recipe already has this technique, change its
        settings.
        """
        name, settings = techniques.split_settings(words)
        self.make_room(name)
        return self.override("--with", {"techniques": _nested(name, toml_table(settings, words))})

    def make_room(self, name: str) -> None:
        """Remove the recipe's techniques that make the same decision as the technique `name`, which will be added: an
        added optimizer replaces the recipe's. Other added techniques stay, so that `compose` refuses the pair."""
        if name in (present := self._technique_names()):
            return
        claims = techniques.find(name).claims
        for other in present:
            if other not in self.added and claims & techniques.find(other).claims:
                self.drop_technique(other)
                self.replaced[other] = name
        self.added.add(name)

    def drop_technique(self, name: str) -> "RecipeLayers":
        """Remove a technique. Raises UsageError if the recipe does not use it."""
        present = self._technique_names()
        name = name if name in present else techniques.full_name(name)
        if name not in present:
            raise UsageError(f"--without {name}: the recipe does not use it", fix=did_you_mean(name, present))
        if self.base is not None:
            rest = tuple(technique for technique in self.base.techniques if technique.name != name)
            self.base = replace(self.base, techniques=rest)
        *group, last = name.split(".")
        self._table(("techniques", *group)).pop(last, None)
        self._forget(f"techniques.{name}")
        return self

    def apply_changes(
        self, removals: Sequence[str], additions: Sequence[str], assignments: Sequence[str]
    ) -> "RecipeLayers":
        """Apply --without, --with and --set in this order. A removed technique can thus be added with new settings."""
        for name in removals:
            self.drop_technique(name)
        for words in additions:
            self.add_technique(words)
        for assignment in assignments:
            self.set(assignment)
        return self

    def apply_mesh(self, axes: str) -> "RecipeLayers":
        """Set the mesh, such as `tensor=2,pipeline=2`, and add techniques that its axes require."""
        sizes = toml_table(axes, axes, "--mesh", "")
        self.replace("--mesh", "mesh", sizes)
        for axis, size in sizes.items():
            claim, name = USED_BY.get(axis, ("", ""))
            present = [techniques.find(other) for other in self._technique_names()]
            if name and size != 1 and not any(claim in technique.claims for technique in present):
                self.override("--mesh", {"techniques": _nested(name, {})})
        return self

    def changed(self) -> dict[str, str]:
        """Return the origin of each value that is not the default."""
        chosen = tuple(techniques.find(name)() for name in self._technique_names())
        values, default = self.values(), RecipeLayers(Recipe(techniques=chosen)).values()
        return {
            path: origin
            for path, origin in self.origins.items()
            if path not in default or values.get(path) != default[path]
        }

    def values(self) -> dict[str, Any]:
        """Return the value of each setting by its path, such as `data.batch`. Values are not checked."""
        return (_values(recipe_to_data(self.base)) if self.base else {}) | _values(self.changes)

    def apply_model(self, model: str | None, arguments: Sequence[str] = ()) -> "RecipeLayers":
        """Set the model to a preset, a folder, a model of `thrifty data list`, or the name of a function with arguments
        `key=value`.

        If the recipe already uses this function, its arguments remain. Sizes of another model are removed. A folder's
        tokenizer is used, unless the recipe sets a tokenizer.
        """
        present = self.values()
        if model is not None and present.get("about"):
            self.override("--model", {"about": ""})  # it describes the recipe's model
        fetched = folder_of_model(model or "")
        model = model if fetched is None else str(fetched)
        if is_function_name(model):
            self.names["model"] = model or ""
            if present.get("model.build") != model:
                self.replace("--model", "model", {"build": model})
        elif model is not None and (fetched or Path(model).is_dir()):
            reinitialize = present.get("model.reinitialize", False)
            folder = str(Path(model).resolve())  # valid also if the run is resumed from another folder
            self.is_now_pretrained = not present.get("model.folder")
            self.replace("--model", "model", {"folder": folder, "reinitialize": reinitialize})
            tokenizer = Path(folder, "tokenizer.json")
            if tokenizer.is_file() and not present.get("data.tokenizer"):
                self.override("--model", {"data": {"tokenizer": str(tokenizer)}})
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

    def lower_rate(self) -> "RecipeLayers":
        """Replace the learning rate of AdamW, which Thrifty's recipe has for a new model, if the model is pretrained. A
        rate of the user, also in a recipe file, stays."""
        path, values = "techniques.optimizers.adamw.lr", self.values()
        origin = self.origins.get(path, "")
        is_own = origin.startswith("recipe ") and not origin.endswith(".toml")
        if self.is_now_pretrained and not values.get("model.reinitialize") and is_own:
            self.assign(PRETRAINED, path, fine_tuning_rate(self._technique_names()))
        return self

    def apply_objects(self, data: str | None, held_out: str | None, loss: str | None) -> "RecipeLayers":
        """Set data, held-out data and loss.

        An argument can be the name of a user's object. Otherwise data is a path or a named data set, and the loss is an
        objective. Existing paths become absolute. Raises UsageError if only one of data and held-out data is a user's
        object.
        """
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
                "a dataset passed by name requires held-out data, also passed by name",
                fix="--data package.module:name --held-out package.module:name",
            )
        return self

    def _drop_sources(self) -> None:
        """Remove `data.sources`, because this mixture would replace the typed source."""
        if self.base is not None:
            self.base = replace(self.base, data=replace(self.base.data, sources={}))
        self._table(("data",)).pop("sources", None)
        self._forget("data.sources")

    def recipe(self) -> Recipe:
        """Return the checked recipe with the user's objects. Only objects named in these layers are imported."""
        recipe = recipe_from_data(self.changes, self.base)
        names = {name: text for name, text in self.names.items() if name != "model" or recipe.model.build == text}
        if not names:
            return recipe
        own, known = UserObjects.from_arguments(**names), recipe.objects
        passed = {name: getattr(own, name) for name in names}
        return replace(recipe, objects=replace(known, **passed, names={**known.names, **names}))

    def optimizer_name(self, option: str) -> str:
        """Return the name of the optimizer. Raise UsageError, with the option, unless there is exactly one with
        a learning rate.
        """
        present = [techniques.find(name) for name in self._technique_names()]
        named = [each.name for each in present if Claim.OPTIMIZER in each.claims and hasattr(each(), "lr")]
        if len(named) != 1:
            what = f"{option}: the recipe has {len(named)} optimizers with a learning rate"
            raise UsageError(what, fix="--with optimizers.adamw:lr=0.001; remove another by --without NAME")
        return named[0]

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
                raise UsageError(
                    f"{'.'.join(path)} is set as a value and as a table", fix=f"keep only the table [{'.'.join(path)}]"
                )
            table = table.setdefault(name, {})
        return table


def _values(table: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in table.items():
        values |= _values(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
    return values


def _nested(path: str, value: Any) -> dict[str, Any]:
    """Return nested tables: {"a": {"b": value}} for path `a.b`."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def toml_value(text: str) -> Any:
    """Return the value of a TOML literal, or the text if it is not TOML."""
    try:
        return parse_toml(f"value = {text}", f"--set {text[:80]!r}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def toml_table(settings: str, words: str, option: str = "--with", form: str = "name:") -> dict[str, Any]:
    """Return settings such as `lr=1e-3,betas=[0.9,0.95],moments=copy` as a table. Text requires no quotes.

    Error messages contain the `option`, its full value `words`, and the `form` of the text before the table.
    """
    bare = r"""("[^"]*"|'[^']*')|=\s*(?!(?:true|false|inf|nan)\b)([A-Za-z_][\w.-]*)"""
    quoted = re.sub(bare, lambda match: match[1] or f'="{match[2]}"', settings)
    try:
        return parse_toml(f"table = {{{quoted}}}", f"{option} {words[:80]!r}")["table"]
    except tomllib.TOMLDecodeError:
        example = f"{option} {'optimizers.adamw:lr=1e-3' if form else 'KEY=1'}"
        raise UsageError(f"{option} {words!r} is not {form}key=value,key=value", f"for example {example}") from None
