"""`thrifty plan --cluster`: choose a mesh for a recipe on a simulated cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from thrifty.core.errors import RefusedError, UsageError
from thrifty.interface.plan_output import NEAR, considered
from thrifty.interface.progress import progress
from thrifty.reporting.number_format import duration, percent, scaled, significant
from thrifty.reporting.printed_result import open_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from thrifty.core.recipe import Recipe
    from thrifty.planning.cluster_plan import ClusterPlan
    from thrifty.planning.forecast import PlanRequest
    from thrifty.simulators.cluster.workload import Workload
    from thrifty.training.run_setup import PreparedRun


def plan_on_cluster(
    recipe: Recipe,
    wanted: PlanRequest,
    place: str,
    ranks: int | None,
    quiet: bool = False,
) -> ClusterPlan:
    """Plan a recipe on a simulated cluster. Raise InfeasibleError if no layout fits, and UsageError if the recipe
    cannot be simulated.
    """
    from thrifty import techniques
    from thrifty.planning.cluster_file import read_cluster
    from thrifty.planning.cluster_plan import ClusterPlanner
    from thrifty.planning.planner import STEPS
    from thrifty.training.run_setup import prepare_run

    if recipe.mesh.least_ranks > 1:
        raise UsageError("the recipe has a mesh, but --cluster chooses one", fix="remove the mesh from the recipe")
    cluster = read_cluster(place)
    cluster = cluster if ranks is None else cluster.of(ranks)
    prepared = prepare_run(recipe, steps=recipe.budget.steps or STEPS, quiet=quiet)
    return ClusterPlanner(
        recipe=prepared.recipe_in_steps,
        plain=prepared.run.plain,
        workload=_workload(prepared),
        cluster=cluster,
        place=place,
        catalogue={name: techniques.find(name) for name in techniques.own_names()},
        request=wanted,
        tokens=prepared.data.example_unit,
        steps=prepared.run.steps,
        say=progress(quiet, "planning: "),
    ).plan()


def _workload(prepared: PreparedRun) -> Workload:
    """Return the traced model as a workload of the simulator. Raise RefusedError if the model's input is not text."""
    import torch

    from thrifty.simulators.cluster.traced_workload import trace_workload

    recipe = prepared.recipe
    if prepared.run.plain.objective.sees_images:
        raise RefusedError(
            f"steps on a cluster are simulated only for text models, but {recipe.objective.name} trains on "
            f"{prepared.run.plain.objective.learns_from[0]}",
            fix="leave out --cluster",
        )

    dtype = torch.bfloat16 if any(t.is_low_precision for t in recipe.techniques) else torch.float32
    return trace_workload(recipe.name, prepared.run.plain.build, recipe.data.length, dtype=dtype)


def format_cluster_plan(plan: ClusterPlan) -> list[str]:
    """Return the chosen layout and the forecast, one entry per line."""
    step, seconds, footprint = plan.step(plan.chosen), plan.seconds, plan.chosen.footprint
    (most, share), (spent, part) = plan.dominant["memory"], plan.dominant["time"]
    rate = plan.tokens / step.value
    lines = [
        f"mesh     {plan.chosen.layout.label}, on {plan.place}",
        f"memory   {scaled(footprint.memory, 'B')} of {scaled(plan.limit, 'B')} per rank (tensors, counted); "
        f"largest part: {most}, {percent(share, 0)}",
        f"step     {duration(step.value)} ({duration(step.low)} to {duration(step.high)}), simulated, not measured; "
        f"{percent(part, 0)} of it {spent}",
        f"rate     {scaled(rate, 'tokens/s')}, simulated",
        f"budget   {duration(seconds.value)} for {plan.steps:,.0f} steps, {scaled(plan.steps * plan.tokens)} tokens",
    ]
    return lines if plan.cost is None else [*lines, f"cost     {significant(plan.cost.value)}"]


def cluster_plan_parts(plan: ClusterPlan, is_whole: bool) -> list[RenderableType]:
    """Return a cluster plan as lines and tables; see `plan_parts`."""
    table = open_table("", "layouts that fit, fastest first (simulated)", "memory", "step", "tokens/s")
    near = plan.alternatives if is_whole else plan.alternatives[: NEAR - 1]
    for placed in (plan.chosen, *near):
        mark = "→" if placed is plan.chosen else ""
        memory, seconds = scaled(placed.footprint.memory, "B"), placed.layout.seconds
        table.add_row(mark, escape(placed.layout.label), memory, duration(seconds), scaled(plan.tokens / seconds))
    return [*format_cluster_plan(plan), "", table, *considered(plan, len(near), is_whole)]
