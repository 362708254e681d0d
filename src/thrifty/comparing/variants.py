"""Arms of a comparison: recipes, or what is changed of the first one."""

import os
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from thrifty.core.claims import Claim
from thrifty.core.errors import UsageError
from thrifty.core.plain_values import differences, to_data
from thrifty.core.recipe import Recipe
from thrifty.core.technique import Technique
from thrifty.recipes.recipe_layers import RecipeLayers
from thrifty.recipes.recipe_toml import recipe_to_data

BASELINE = "baseline"
OF_THE_RACE = ("budget", "evaluation")
"""What of a recipe is set for all arms alike."""
OF_TRAINING = ("batch", "augment")
"""What of a recipe's data may differ between arms: it does not touch what they are judged on."""


@dataclass(frozen=True)
class Variant:
    label: str
    """Its name, or what was asked for, such as "+growth.stacking"; "baseline" for the first."""
    folder: str
    """What the names of its runs begin with."""
    recipe: Recipe

    @property
    def optimizer(self) -> Technique | None:
        """The technique whose learning rate is tuned."""
        found = [one for one in self.recipe.techniques if Claim.OPTIMIZER in one.claims and hasattr(one, "lr")]
        return found[0] if found else None

    @property
    def rate(self) -> float | None:
        """The learning rate of its recipe."""
        return None if self.optimizer is None else float(self.optimizer.lr)  # type: ignore[attr-defined]

    def at_rate(self, factor: float) -> "Variant":
        """The arm with its learning rate times a factor."""
        if factor == 1 or (optimizer := self.optimizer) is None:
            return self
        changed = replace(optimizer, lr=optimizer.lr * factor)  # type: ignore[attr-defined]
        techniques = tuple(changed if one is optimizer else one for one in self.recipe.techniques)
        return replace(self, recipe=replace(self.recipe, techniques=techniques))

    def against(self, baseline: "Variant") -> dict[str, list[str]]:
        """The techniques by which it differs from the baseline: "added", "removed", and "changed" settings."""
        mine = {one.name: to_data(one) for one in self.recipe.techniques}
        its = {one.name: to_data(one) for one in baseline.recipe.techniques}
        changed = [name for name in mine if name in its and mine[name] != its[name]]
        return {
            "added": sorted(mine.keys() - its.keys()),
            "removed": sorted(its.keys() - mine.keys()),
            "changed": changed,
        }


def read_variants(
    texts: Sequence[str], baseline: RecipeLayers, lay: Callable[[str], RecipeLayers]
) -> tuple[Variant, ...]:
    """The baseline, and an arm for each text: a recipe's file, or words separated by spaces, of which the first may
    name a recipe and all others change it or the baseline.

        +NAME:KEY=VALUE,…   adds a technique       -NAME   takes one out       PATH=VALUE   sets any value

    "NAME: …" gives it a name. `lay` gives the layers of a recipe by its name. Raises UsageError for what is none of
    these, for two arms that are one, and for arms whose held-out losses would mean different things.
    """
    if not texts:
        raise UsageError(
            "there is nothing to compare with", fix="name an arm, such as +growth.stacking or data.batch=16"
        )
    arms = [Variant(BASELINE, BASELINE, baseline.recipe())]
    for number, text in enumerate(texts, start=1):
        arm = _read(text, f"arm-{number}", baseline, lay)
        same = [other.label for other in arms if _but_name(other.recipe) == _but_name(arm.recipe)]
        if same:
            raise UsageError(
                f"arm {arm.label!r} is the same run as {same[0]!r}",
                fix="change something of it; for a race of equals its seeds, such as seed=1000",
            )
        if arm.label in [other.label for other in arms]:
            raise UsageError(
                f"two arms are called {arm.label!r}", fix="call them by names of their own, such as 'big: …'"
            )
        arms.append(arm)
    check_alike(arms)
    return tuple(arms)


def _read(text: str, folder: str, baseline: RecipeLayers, lay: Callable[[str], RecipeLayers]) -> Variant:
    name, colon, rest = text.partition(": ")
    label, changes = (name.strip(), rest.strip()) if colon else (text.strip(), text.strip())
    words = [changes] if os.path.isfile(changes) else changes.split()  # a file's name may have spaces
    if not label or not words:
        raise UsageError(f"arm {text!r} is empty", fix="leave it out, or say what it changes: +NAME, -NAME, PATH=VALUE")
    is_recipe = not words[0].startswith(("+", "-")) and "=" not in words[0]
    layers = lay(words[0]) if is_recipe else deepcopy(baseline)
    removals, additions, assignments = [], [], []
    for word in words[is_recipe:]:
        if word.startswith("--"):
            raise UsageError(
                f"{word} is no option of compare", fix="thrifty compare --help; an arm takes one - to remove"
            )
        if word.startswith("-"):
            removals.append(word[1:])
        elif word.startswith("+"):
            additions.append(word[1:])
        elif "=" in word:
            if word.partition(".")[0] in OF_THE_RACE:
                raise UsageError(
                    f"arm {text!r}: {word} cannot be of one arm", fix=f"--set {word}, which is of all arms"
                )
            assignments.append(word)
        else:
            raise UsageError(
                f"arm {text!r}: {word!r} changes nothing", fix=f"+{word} adds a technique, -{word} takes it out"
            )
    layers.apply_changes(removals, additions, assignments)
    return Variant(label, folder, layers.recipe())


def check_alike(arms: Iterable[Variant]) -> None:
    """Raises UsageError where the held-out loss of an arm does not mean what the baseline's does, or where an arm needs
    several ranks."""
    baseline, *others = arms
    meant = _judged_on(baseline.recipe)
    for arm in others:
        if other := differences(meant, _judged_on(arm.recipe)):
            raise UsageError(
                f"arm {arm.label!r} is judged on something else than the baseline: {'; '.join(other)}",
                fix="give all arms the same data and objective; data.batch and data.augment may differ",
            )
    for arm in (baseline, *others):
        if arm.recipe.mesh.least_ranks > 1:
            raise UsageError(
                f"arm {arm.label!r} has a mesh, and a comparison starts its runs in one process each",
                fix="compare without the mesh",
            )


def _judged_on(recipe: Recipe) -> dict[str, Any]:
    data = recipe_to_data(recipe)
    seen = {name: value for name, value in data["data"].items() if name not in OF_TRAINING}
    return {"data": seen, "objective": data["objective"]}


def _but_name(recipe: Recipe) -> Recipe:
    return replace(recipe, name="run", about="")
