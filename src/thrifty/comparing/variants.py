"""Variants of a comparison: recipes, or changes of the baseline, written like `thrifty train` options."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thrifty.comparing.saved_comparison import BASELINE
from thrifty.composition.technique_optimizer import FOLLOWING_RATES
from thrifty.core.claims import Claim
from thrifty.core.errors import UsageError, spelled
from thrifty.core.plain_values import differences, to_data
from thrifty.core.recipe import EvaluationSettings, Recipe
from thrifty.core.technique import Technique
from thrifty.recipes.recipe_layers import RecipeLayers
from thrifty.recipes.recipe_toml import recipe_to_data

OF_THE_RACE = ("budget", "evaluation")
"""Recipe tables that are equal for all variants."""
OF_TRAINING = ("batch", "augment")
"""Data settings that may differ between variants, because `evaluated_like` makes held-out losses independent of
them."""
Change = str | Technique | type[Technique]
"""Change of the baseline: a technique to add, as an object, a class or by name ("lion:lr=2e-4"); a technique to remove
("-adamw"); or a setting ("data.batch=16").
"""


@dataclass(frozen=True)
class Variant:
    label: str
    """Name or command-line text of the variant, such as "--with growth.stacking"; "baseline" for the baseline."""
    folder: str
    """Prefix of the names of the variant's runs."""
    recipe: Recipe

    @property
    def optimizer(self) -> Technique | None:
        """Optimizer technique, whose learning rate is tuned; None if the recipe has none."""
        optimizers = [one for one in self.recipe.techniques if Claim.OPTIMIZER in one.claims]
        return optimizers[0] if optimizers else None

    @property
    def rate(self) -> float | None:
        """Learning rate of the variant's recipe; None without a tuned optimizer."""
        return None if self.optimizer is None else float(self.optimizer.lr)  # type: ignore[attr-defined]

    @property
    def rates(self) -> dict[str, float]:
        """Learning rates of the optimizer by the name of the setting. They are tuned together."""
        values = {name: getattr(self.optimizer, name, None) for name in ("lr", *FOLLOWING_RATES)}
        return {name: value for name, value in values.items() if value is not None}

    def at_rate(self, factor: float) -> "Variant":
        """Return the variant with its learning rates multiplied by a factor."""
        if factor == 1 or (optimizer := self.optimizer) is None:
            return self
        changed = replace(optimizer, **{name: rate * factor for name, rate in self.rates.items()})  # type: ignore[arg-type]
        techniques = tuple(changed if one is optimizer else one for one in self.recipe.techniques)
        return replace(self, recipe=replace(self.recipe, techniques=techniques))

    def against(self, baseline: "Variant") -> dict[str, list[str]]:
        """Return the names of the techniques that this variant "added", "removed" or "changed", relative to the
        baseline.
        """
        mine = {one.name: to_data(one) for one in self.recipe.techniques}
        its = {one.name: to_data(one) for one in baseline.recipe.techniques}
        added, removed = sorted(mine.keys() - its.keys()), sorted(its.keys() - mine.keys())
        changed = [name for name in mine if name in its and mine[name] != its[name]]
        return {"added": added, "removed": removed, "changed": changed}


def variants_of(baseline: Recipe, changes: Mapping[str, Recipe | Change | Sequence[Change]]) -> tuple[Variant, ...]:
    """Return the baseline, and a variant for each name in `changes`. A variant is a recipe, or changes of the baseline.
    If the first change is a recipe, this recipe replaces the baseline. Raises UsageError if two variants are the same
    run, or if their held-out losses are not comparable.
    """
    if not changes:
        raise UsageError(
            "the comparison has no variant besides the baseline",
            fix=spelled('--variant "--with growth.stacking"', 'variants={"lion": "lion:lr=2e-4"}'),
        )
    variants = [Variant(BASELINE, BASELINE, baseline)]
    for number, (label, own) in enumerate(changes.items(), start=1):
        if label == BASELINE:
            raise UsageError(f"two variants are called {label!r}", fix="use another name for the variant")
        listed = own if isinstance(own, Sequence) and not isinstance(own, str) else [own]
        variant = Variant(label, f"variant-{number}", _changed(baseline, listed, label))
        same = [other.label for other in variants if _but_name(other.recipe) == _but_name(variant.recipe)]
        if same:
            raise UsageError(
                f"variant {variant.label!r} is the same run as {same[0]!r}",
                fix="change a setting of the variant; or, to compare equal variants, change the seed: "
                + spelled("--set seed=1000", '"seed=1000"'),
            )
        variants.append(variant)
    check_alike(variants)
    return tuple(variants)


def _changed(recipe: Recipe, changes: Sequence[Recipe | Change], label: str) -> Recipe:
    """Return the recipe after all changes, applied in order."""
    layers = RecipeLayers.above("recipe", recipe)
    for change in changes:
        if isinstance(change, Recipe):
            layers = RecipeLayers.above("recipe", change)
        elif isinstance(change, str):
            _change_by_text(layers, change.strip(), label)
        else:
            chosen = change if isinstance(change, Technique) else change()
            layers.make_room(chosen.name)
            others = tuple(one for one in layers.recipe().techniques if one.name != chosen.name)
            changed = replace(layers.recipe(), techniques=(*others, chosen))
            layers = RecipeLayers(changed, added=layers.added)
    return layers.recipe()


def _change_by_text(layers: RecipeLayers, change: str, label: str) -> RecipeLayers:
    if change.startswith("-"):
        return layers.drop_technique(change[1:].strip())
    name = change.partition("=")[0]
    if name == change or ":" in name:
        return layers.add_technique(change)
    if name.partition(".")[0] in OF_THE_RACE:
        raise UsageError(
            f"variant {label!r}: {change!r} cannot differ between variants",
            fix=spelled(
                f"put --set {change} outside the quotes, for all variants", "change the baseline, for all variants"
            ),
        )
    return layers.set(change)


def check_alike(variants: Iterable[Variant]) -> None:
    """Raise UsageError if a variant's held-out loss is not comparable with the baseline's, or if a variant requires
    several ranks.
    """
    baseline, *others = variants
    judged_on = _judged_on(baseline.recipe)
    for variant in others:
        if other := differences(judged_on, _judged_on(variant.recipe)):
            raise UsageError(
                f"variant {variant.label!r} is not comparable with the baseline: {'; '.join(other)}",
                fix="use the same data and objective for all variants; data.batch and data.augment may differ",
            )
    for variant in (baseline, *others):
        if variant.recipe.mesh.least_ranks > 1:
            raise UsageError(
                f"variant {variant.label!r} has a mesh, but a comparison starts each run in one process",
                fix="remove the mesh from its recipe",
            )


def evaluated_like(baseline: Recipe, recipe: Recipe) -> EvaluationSettings:
    """Return the baseline's evaluation settings for a recipe, with the baseline's batch. The value of a loss that
    compares the examples of a batch, and of one that is a mean over a batch, depends on the batch.
    """
    settings = baseline.evaluation
    if recipe.data.batch == baseline.data.batch:
        return settings
    return replace(settings, batch=settings.batch or baseline.data.batch)


def _judged_on(recipe: Recipe) -> dict[str, Any]:
    data = recipe_to_data(recipe)
    objects = {name: data["python"][name] for name in ("data", "held_out", "loss") if data["python"][name]}
    tables = {name: value for name, value in data["data"].items() if name not in OF_TRAINING}
    return {"data": tables, "objective": data.get("objective"), "python": objects}


def _but_name(recipe: Recipe) -> Recipe:
    return replace(recipe, name="run", about="")
