"""Why each technique of the catalogue is in a plan for a cluster, or is not."""

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
    found: Sequence[ClusterLayout]
    """Everything that was simulated, from the fastest."""
    catalogue: Catalogue
    allow: Numerics

    def all(self) -> list[ChoiceReason]:
        return [self.of(name) for name in sorted(self.catalogue)]

    def of(self, name: str) -> ChoiceReason:
        match verdict := verdict_on(name, self.before, self.after):
            case "kept":
                why = "your recipe has it"
            case "taken out":
                why = "the fastest layout that fits has no use for it"
            case "not taken":
                why = self._not_taken(name)
            case _:
                why = self._share(name)
        return ChoiceReason(name, verdict, why)

    def _share(self, name: str) -> str:
        if (axis := _axis(name)) is not None:
            return f"{getattr(self.chosen.mesh, axis)} ranks along {axis} are in the fastest layout that fits"
        return "part of the fastest layout that fits"

    def _not_taken(self, name: str) -> str:
        if (axis := _axis(name)) is not None:
            return self._of_axis(axis)
        if name in (ACCUMULATE, RECOMPUTE):
            return "the fastest layout that fits does without it"
        if NUMERICS_ORDER.index(self.catalogue[name].numerics) > NUMERICS_ORDER.index(self.allow):
            return f"changes the result, and you asked for {self.allow.value}"
        return "not looked at: nothing is simulated of it; a plan for one device (without --cluster) tells what it does"

    def _of_axis(self, axis: str) -> str:
        if axis == "replicate" and self.chosen.mesh.replicate > 1:
            return "parallelism.shard serves the ranks along replicate as well"
        first = next((layout for layout in self.found if getattr(layout.mesh, axis) > 1), None)
        if first is None:
            return f"no layout has ranks along {axis}"
        ratio = first.seconds / self.chosen.seconds
        if ratio < 1:
            return (
                f"by simulation a step takes {ratio:.2f} of the plan's time with it, but it does not fit or is refused"
            )
        return f"by simulation the fastest layout with it takes {ratio:.2f} of the plan's time"


def _axis(name: str) -> str | None:
    return next((axis for axis, technique in TECHNIQUES.items() if technique == name), None)
