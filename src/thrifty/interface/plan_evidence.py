"""Evidence for the choices of a plan, from measured results in results/ and runs/."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thrifty.core.errors import ThriftyError
from thrifty.core.plain_values import build
from thrifty.core.technique import Numerics
from thrifty.experiments.evidence import evidence_by_technique
from thrifty.experiments.past_results import OWN
from thrifty.planning.proven_gains import AXIS, ProvenGain
from thrifty.planning.search_space import PlanOption, label_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thrifty.core.recipe import Recipe
    from thrifty.core.technique import Technique
    from thrifty.experiments.past_results import PastComparison
    from thrifty.planning.search_space import Catalogue


def evidence_lines(names: Iterable[str]) -> dict[str, str]:
    """Return one line of evidence for each technique that has been measured."""
    evidence = evidence_by_technique()
    return {name: evidence[name].best() for name in names if name in evidence}


def proven_gains(comparisons: Iterable[PastComparison], recipe: Recipe, catalogue: Catalogue) -> list[ProvenGain]:
    """Return the gains that comparisons proved for the objective of a recipe.

    A gain is proven if the technique, alone or in place of another technique of the recipe, is better than the baseline
    and reached the baseline's loss in less time, and no comparison of a similar model found it worse. Techniques whose
    steps change during a run are left out, because a plan measures only a few steps.
    """
    gains, worse = [], []
    for one in comparisons:
        if one.role != "added" or not one.has_learned or not _applies(one, recipe):
            continue
        if one.verdict == "worse":
            worse.append(one)
        steps, step_time = one.steps_to_quality, one.step_time or 1.0
        if one.verdict != "better" or steps is None or steps * step_time >= 1 or one.technique not in catalogue:
            continue
        option = _option(catalogue[one.technique], one, recipe, steps)
        if option is not None and not option.techniques[0].overrides("batches", "changes"):
            gains.append((one.technique, ProvenGain(option, one.parameters, one.pairs, step_time)))
    return [
        gain for name, gain in gains if not any(o.technique == name and gain.is_similar(o.parameters) for o in worse)
    ]


def _applies(one: PastComparison, recipe: Recipe) -> bool:
    """Return True if the recipe has the same objective, and the techniques that the comparison replaced."""
    names = {technique.name for technique in recipe.techniques}
    model = recipe.model
    is_pretrained = model.weights == "given" or (bool(model.folder) and not model.reinitialize)
    objective = OWN if recipe.python.loss or recipe.python.data else recipe.objective.name
    is_alike = OWN != one.objective == objective and one.is_pretrained == is_pretrained
    replaces = one.is_replacement and {*one.others} <= names
    return is_alike and one.technique not in names and (one.alone or replaces)


def _option(kind: type[Technique], one: PastComparison, recipe: Recipe, steps: float) -> PlanOption | None:
    """Return the compared technique as an option. Its learning rates keep their ratio to the replaced optimizer's."""
    settings = dict(one.settings)
    rates = [getattr(each, "lr", None) for each in recipe.techniques if each.name in one.others]
    if one.baseline_rate and rates and isinstance(rates[0], float):
        scale = rates[0] / one.baseline_rate
        settings |= {name: value * scale for name, value in settings.items() if name.rpartition("_")[2] == "lr"}
    try:
        technique = build(kind, settings, kind.name)
    except ThriftyError:  # settings of another version
        return None
    drops, label = frozenset(one.others), label_of(technique)
    return PlanOption(AXIS, (technique,), drops, 1.0, Numerics.DIFFERENT, label, relative_steps=steps)
