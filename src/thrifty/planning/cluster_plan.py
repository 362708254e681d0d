"""Plans for a cluster: mesh sizes and step settings, chosen by simulated step time and counted memory.

All layouts are simulated. For the fastest layouts, the footprint of a rank is counted with the actual techniques, until
enough layouts fit. Nothing runs on a device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from thrifty.composition.compose import BaseRun, compose
from thrifty.core.claims import Claim
from thrifty.core.errors import InfeasibleError, UsageError, reason_of
from thrifty.core.footprint import Footprint
from thrifty.core.recipe import Budget, Recipe
from thrifty.core.technique import Numerics, Technique
from thrifty.distributed.fake_ranks import fake_first_rank
from thrifty.planning.choice_explanations import ChoiceReason
from thrifty.planning.cluster_explanations import ClusterChoiceExplainer
from thrifty.planning.cluster_layouts import ACCUMULATE, RECOMPUTE, TECHNIQUES, ClusterLayout, layouts, recipe_mesh
from thrifty.planning.cost_estimates import OVER_MESH_HIGH, Estimate, count_footprint, largest_part
from thrifty.planning.forecast import PlanRequest, refuse_no_step
from thrifty.planning.search_space import Catalogue
from thrifty.simulators.cluster.network_topology import Cluster
from thrifty.simulators.cluster.workload import Recompute, Workload

ALTERNATIVES, COUNTS, MOST_COUNTS = 4, 24, 48
"""Number of alternatives to the fastest layout. Maximum number of layouts whose memory is counted: if one fits, and if
none fits."""
TOO_MUCH = 2.0
"""Maximum simulated memory of a layout whose footprint is counted, as a multiple of the memory limit."""
TOO_LARGE = "does not fit"
PARTS = {
    "compute": "computing",
    "tensor": "collectives of tensor groups",
    "bubble": "the pipeline's bubble",
    "transfers": "messages between stages",
    "data": "collectives of data ranks",
    "optimizer": "the update",
}


@dataclass(frozen=True)
class PlacedLayout:
    """A layout with a counted footprint that fits, and the techniques for the layout."""

    layout: ClusterLayout
    techniques: tuple[Technique, ...]
    footprint: Footprint


@dataclass(frozen=True)
class ClusterPlan:
    recipe: Recipe
    cluster: Cluster
    place: str
    """Name or file of the cluster."""
    limit: float
    """Memory limit per rank, in bytes."""
    chosen: PlacedLayout
    alternatives: tuple[PlacedLayout, ...]
    misfits: Mapping[str, str]
    reasons: tuple[ChoiceReason, ...]
    tokens: float
    """Number of tokens per step."""
    steps: float
    price: float | None

    def step(self, placed: PlacedLayout) -> Estimate:
        """Return the simulated seconds of a step, with the 90 % interval from published runs on the device."""
        return Estimate(placed.layout.seconds, *placed.layout.report.interval("step_seconds"))

    @property
    def seconds(self) -> Estimate:
        return self.step(self.chosen).times(self.steps)

    @property
    def cost(self) -> Estimate | None:
        return None if self.price is None else self.seconds.times(self.price / 3600)

    @property
    def dominant(self) -> dict[str, tuple[str, float]]:
        seconds = vars(self.chosen.layout.report.seconds)
        name = max(seconds, key=lambda part: seconds[part])
        return {
            "memory": largest_part(self.chosen.footprint),
            "time": (PARTS[name], seconds[name] / self.chosen.layout.seconds),
        }

    def as_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.name,
            "cluster": self.place,
            "simulated": True,
            "mesh": vars(self.recipe.mesh),
            "limit": self.limit,
            "steps": self.steps,
            "seconds": self.seconds.as_dict(),
            "cost": self.cost and self.cost.as_dict(),
            "dominant": {name: [*techniques] for name, techniques in self.dominant.items()},
            "alternatives": [
                {
                    "layout": placed.layout.label,
                    "memory": placed.footprint.memory,
                    "step": self.step(placed).as_dict(),
                    "tokens_per_second": self.tokens / placed.layout.seconds,
                }
                for placed in (self.chosen, *self.alternatives)
            ],
            "misfits": dict(self.misfits),
            "techniques": [reason.as_dict() for reason in self.reasons],
        }


@dataclass(frozen=True)
class ClusterPlanner:
    """Planner for a recipe on all ranks of a cluster. `tokens` is the number of tokens per example."""

    recipe: Recipe
    plain: BaseRun
    workload: Workload
    cluster: Cluster
    place: str
    catalogue: Catalogue
    request: PlanRequest
    tokens: int
    steps: int
    say: Callable[[str], None] = lambda text: None

    def plan(self) -> ClusterPlan:
        """Return the plan. Raises UsageError for several ranks if the request allows only exact changes.

        Raises InfeasibleError if no layout fits the memory, or if the fastest layout exceeds the time limit.
        """
        if self.request.allow is Numerics.EXACT and self.cluster.ranks > 1:
            raise UsageError(
                "several ranks sum in a different order than one rank, which --allow exact forbids",
                fix="--allow rounding",
            )
        candidates = layouts(self.workload, self.cluster, self.plain.source.batch, self._format(), self._recompute())
        if self.request.allow is Numerics.EXACT:
            candidates = [layout for layout in candidates if layout.report.micro_batches == self._parts()]
        if not candidates:
            raise InfeasibleError(
                f"an effective batch of {self.plain.source.batch} cannot be divided over {self.cluster.ranks:,} ranks",
                fix=f"--set data.batch={self.cluster.ranks}; or use fewer --ranks",
            )
        self.say(f"{len(candidates)} layouts of {self.cluster.ranks:,} ranks simulated")
        placed, misfits = self._counted(candidates)
        if not placed:
            self._raise_infeasible(candidates, misfits)
        chosen = placed[0]
        budget = self.request.budget(self.recipe.budget, self.workload.model_flops * self.plain.source.batch)
        per_step, seconds = self.plain.source.batch * self.tokens, chosen.layout.seconds
        steps = _steps(budget, seconds, per_step)
        refuse_no_step(budget, steps, seconds, per_step)
        before, allow = self.recipe.techniques, self.request.allow
        reasons = ClusterChoiceExplainer(before, chosen.techniques, chosen.layout, candidates, self.catalogue, allow)
        plan = ClusterPlan(
            recipe=replace(
                self.recipe,
                name=f"{self.recipe.name}-planned",
                techniques=chosen.techniques,
                mesh=recipe_mesh(chosen.layout.mesh),
                budget=budget,
            ),
            cluster=self.cluster,
            place=self.place,
            limit=self._limit,
            chosen=chosen,
            alternatives=tuple(placed[1:]),
            misfits=misfits,
            reasons=tuple(reasons.all()),
            tokens=per_step,
            steps=steps,
            price=self.request.price,
        )
        self.request.refuse_late(plan.seconds)
        return plan

    def _raise_infeasible(self, candidates: list[ClusterLayout], misfits: Mapping[str, str]) -> NoReturn:
        if misfits and not any(why.startswith(TOO_LARGE) for why in misfits.values()):
            label, why = next(iter(misfits.items()))
            raise InfeasibleError(
                f"the recipe refuses every layout; {label}: {why}", fix="remove the refused technique or setting"
            )
        least = min(candidates, key=lambda layout: layout.report.fullest.total)
        needed = least.report.fullest.total
        why = misfits.get(least.label, f"{needed / 1e9:,.1f} GB by simulation")
        raise InfeasibleError(
            f"no layout fits {self._limit / 1e9:,.1f} GB per rank; the smallest is {least.label}: {why}",
            fix="use more --ranks; or a larger --memory; or a smaller model or data.length",
        )

    @property
    def _limit(self) -> float:
        return min(self.request.memory, self.cluster.device.memory)

    def _format(self) -> str:
        """Return the number format of matrix products: the format of the recipe, or a similar format that
        the device supports."""
        mixed = any(technique.is_low_precision for technique in self.recipe.techniques)
        preferred = ("bfloat16", "float16", "float32") if mixed else ("float32", "tfloat32")
        return next(name for name in (*preferred, *self.cluster.device.flops) if name in self.cluster.device.flops)

    def _recompute(self) -> Recompute | None:
        """Return the recompute setting of the recipe, or None if layouts may choose it."""
        return next((t.recomputation for t in self.recipe.techniques if t.recomputation != "none"), None)

    def _parts(self) -> int:
        """Return the number of micro-batches of the recipe. Other numbers change the order of gradient sums."""
        return max((t.micro_batches for t in self.recipe.techniques if Claim.MICRO_BATCHES in t.claims), default=1)

    def _counted(self, candidates: list[ClusterLayout]) -> tuple[list[PlacedLayout], dict[str, str]]:
        """Return the fastest fitting layout per mesh, sorted by time, and the reasons against other layouts."""
        placed: list[PlacedLayout] = []
        misfits: dict[str, str] = {}
        lightest = TOO_MUCH * self._limit
        for layout in candidates:
            memory, tries = layout.report.fullest.total, len(placed) + len(misfits)
            if len(placed) > ALTERNATIVES or tries >= (COUNTS if placed else MOST_COUNTS):
                break
            # after many layouts that do not fit, count only smaller layouts
            most = TOO_MUCH * self._limit if tries < COUNTS else 0.99 * lightest
            if memory > most or layout.mesh in (p.layout.mesh for p in placed):
                continue
            try:
                techniques = self._techniques(layout)
                footprint = self._footprint(layout, techniques)
            except Exception as refusal:  # a bug in one technique must not stop planning
                misfits[layout.label] = reason_of(refusal)
                continue
            if footprint.memory * OVER_MESH_HIGH > self._limit:
                misfits[layout.label] = f"{TOO_LARGE}: {footprint.memory / 1e6:,.0f} MB counted per rank"
                lightest = min(lightest, memory)
                continue
            self.say(f"{layout.label}: {footprint.memory / 1e6:,.0f} MB per rank, {layout.seconds:.3g} s simulated")
            placed.append(PlacedLayout(layout, techniques, footprint))
        return placed, misfits

    def _techniques(self, layout: ClusterLayout) -> tuple[Technique, ...]:
        mesh, parts = layout.mesh, layout.report.micro_batches
        techniques = [t for t in self.recipe.techniques if not t.divides_ranks and Claim.MICRO_BATCHES not in t.claims]
        if mesh.shard > 1:
            techniques.append(self._build(TECHNIQUES["shard"], zero=layout.settings.zero))
        elif mesh.replicate > 1:
            techniques.append(self._build(TECHNIQUES["replicate"]))
        if mesh.tensor > 1:
            techniques.append(self._build(TECHNIQUES["tensor"]))
        if mesh.pipeline > 1:
            techniques.append(self._build(TECHNIQUES["pipeline"], micro_batches=parts))
        elif parts > 1:
            techniques.append(self._build(ACCUMULATE, micro_batches=parts))
        if self._recompute() is None and layout.settings.recompute != "none":
            techniques.append(self._build(RECOMPUTE, schedule=layout.settings.recompute))
        return tuple(techniques)

    def _build(self, name: str, **settings: Any) -> Technique:
        return self.catalogue[name](**settings)

    def _footprint(self, layout: ClusterLayout, techniques: tuple[Technique, ...]) -> Footprint:
        with fake_first_rank(recipe_mesh(layout.mesh)):
            return count_footprint(compose(self.plain, techniques, self.steps))


def _steps(budget: Budget, seconds: float, tokens: float) -> float:
    if budget.seconds is not None:
        return budget.seconds // seconds
    return float(budget.steps or (budget.tokens or 0) // tokens)
