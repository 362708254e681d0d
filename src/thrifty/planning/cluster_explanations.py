"""Reasons for or against each technique of the catalog in a plan for a cluster."""

from collections.abc import Sequence
from dataclasses import dataclass

from thrifty.core.technique import Numerics, Technique
from thrifty.planning.choice_explanations import ChoiceReason, verdict_on
from thrifty.planning.cluster_layouts import ACCUMULATE, RECOMPUTE, TECHNIQUES, ClusterLayout
from thrifty.planning.search_space import NUMERICS_ORDER, Catalogue


@dataclass(frozen=True)
class ClusterChoiceExplainer:
    before: Sequence[Technique]
    after: Sequence[Technique]
    chosen: ClusterLayout
    simulated: Sequence[ClusterLayout]
    """All simulated layouts, fastest first."""
    catalogue: Catalogue
    allow: Numerics

    def all(self) -> list[ChoiceReason]:
        return [self.of(name) for name in sorted(self.catalogue)]

    def of(self, name: str) -> ChoiceReason:
        match verdict := verdict_on(name, self.before, self.after):
            case "kept":
                why = "your recipe has it"
            case "taken out":
                why = "the fastest layout that fits does not use it"
            case "not taken":
                why = self._not_taken(name)
            case _:
                why = self._share(name)
        return ChoiceReason(name, verdict, why)

    def _share(self, name: str) -> str:
        if (axis := _axis(name)) is not None:
            return f"the fastest layout that fits has {getattr(self.chosen.mesh, axis)} ranks along {axis}"
        return "part of the fastest layout that fits"

    def _not_taken(self, name: str) -> str:
        if (axis := _axis(name)) is not None:
            return self._unused_axis(axis)
        if name in (ACCUMULATE, RECOMPUTE):
            return "the fastest layout that fits does not use it"
        if NUMERICS_ORDER.index(self.catalogue[name].numerics) > NUMERICS_ORDER.index(self.allow):
            return f"changes the result; the plan allows only {self.allow.value} changes"
        return "not considered, because it is not simulated; a plan without --cluster considers it"

    def _unused_axis(self, axis: str) -> str:
        if axis == "replicate" and self.chosen.mesh.replicate > 1:
            return "parallelism.shard also handles the ranks along replicate"
        first = next((layout for layout in self.simulated if getattr(layout.mesh, axis) > 1), None)
        if first is None:
            return f"no layout has ranks along {axis}"
        ratio = first.seconds / self.chosen.seconds
        if ratio < 1:
            return f"a simulated step with it takes {ratio:.2f} times the plan's time, but does not fit or is refused"
        return f"the fastest simulated layout with it takes {ratio:.2f} times the plan's time"


def _axis(name: str) -> str | None:
    return next((axis for axis, technique in TECHNIQUES.items() if technique == name), None)
