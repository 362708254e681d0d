"""Page of a plan: the choice and its reasons, memory against the limit, near candidates, and everything considered."""

from __future__ import annotations

from functools import partial
from math import isinf
from typing import TYPE_CHECKING

from thrifty.interface.plan_charts import memory_chart, step_chart
from thrifty.interface.plan_on_cluster import format_cluster_plan
from thrifty.interface.plan_output import NEAR, NOT_TAKEN, format_plan, near_candidates
from thrifty.planning.cost_estimates import Estimate
from thrifty.recipes.recipe_toml import write_recipe
from thrifty.reporting.number_format import duration, scaled
from thrifty.reporting.result_page import GOOD, PageVerdict, ResultPage, page_chart
from thrifty.reporting.run_tables import COMPONENTS, TextTable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thrifty.core.footprint import Footprint
    from thrifty.planning.cluster_plan import ClusterPlan, PlacedLayout
    from thrifty.planning.forecast import Forecast
    from thrifty.planning.plan_candidate import PlanCandidate
    from thrifty.planning.planner import Plan

    Candidates = Sequence[tuple[PlanCandidate, Forecast]]

SHOWN = ("memory", "step", "budget")
"""Lines of the forecast that the page shows below the choice."""
INTERVALS = "The near candidates, with 90 % intervals. The plan is highlighted."


def machine_plan_page(plan: Plan) -> str:
    """Return the page of a plan on this machine."""
    forecast, near = plan.forecast, near_candidates(plan)
    sizes = {"process before the model": forecast.process} if forecast.process else {}
    peak = forecast.peak
    return _page(
        plan,
        about="" if isinf(plan.limit) else f"Techniques for {_limited(peak, plan.limit)} of memory.",
        headline=_headline(plan),
        predictions=format_plan(plan),
        cautions=[plan.stopped] if plan.stopped else [],
        parts=sizes | _parts(plan.chosen.footprint),
        peak=peak,
        seconds={candidate.label: each.step for candidate, each in near},
        chosen=plan.chosen.label,
        tables=[
            _candidates("Near candidates, best first", plan, near),
            _candidates(f"All {len(plan.alternatives)} candidates that fit", plan, plan.alternatives),
        ],
        source="Memory is counted on fake tensors; step times are measured in probes, unless the page says otherwise.",
    )


def cluster_plan_page(plan: ClusterPlan) -> str:
    """Return the page of a plan on a simulated cluster."""
    placed, footprint = (plan.chosen, *plan.alternatives), plan.chosen.footprint
    peak = Estimate.within(footprint.memory, 1, 1)
    return _page(
        plan,
        about=f"A layout on {plan.place} for {_limited(peak, plan.limit)} of memory per rank.",
        headline=plan.chosen.layout.label,
        predictions=format_cluster_plan(plan),
        cautions=[],
        parts=_parts(footprint),
        peak=peak,
        seconds={each.layout.label: plan.step(each) for each in placed[:NEAR]},
        chosen=plan.chosen.layout.label,
        tables=[
            _layouts("Near layouts, fastest first", plan, placed[:NEAR]),
            _layouts(f"All {len(placed)} layouts that fit", plan, placed),
        ],
        source="Memory is counted on fake tensors; step times are simulated, with intervals from published runs.",
    )


def _page(
    plan: Plan | ClusterPlan,
    about: str,
    headline: str,
    predictions: Sequence[str],
    cautions: Sequence[str],
    parts: Mapping[str, float],
    peak: Estimate,
    seconds: Mapping[str, Estimate],
    chosen: str,
    tables: Sequence[TextTable],
    source: str,
) -> str:
    forecast = [(word, text.strip()) for word, _, text in (line.partition(" ") for line in predictions)]
    limit = "" if isinf(plan.limit) else f"The limit is {scaled(plan.limit, 'B')}. "
    memory = f"{limit}Gradients exist only after the activations are freed, so the peak is below the sum of the parts."
    reasons = [(each.technique, each.verdict, each.why) for each in plan.reasons]
    near, *rest = tables
    return ResultPage(
        kind="plan",
        name=plan.recipe.name,
        status="",
        about=about,
        verdicts=[PageVerdict(headline, tone=GOOD)],
        statements=[
            *(("", word.capitalize(), text) for word, text in forecast if word in SHOWN),
            *(("", f"{name} {verdict}", why) for name, verdict, why in reasons if verdict != NOT_TAKEN),
        ],
        cautions=cautions,
        charts=[
            page_chart("Predicted memory", memory, partial(memory_chart, parts, peak, plan.limit), is_whole=False),
            page_chart("Seconds per step", INTERVALS, partial(step_chart, seconds, chosen), is_whole=False),
        ],
        tables=[near],
        folded=[
            *rest,
            TextTable("Candidates that do not fit", ("Candidate", "Reason"), list(plan.misfits.items())),
            TextTable("All techniques", ("Technique", "Verdict", "Reason"), sorted(reasons, key=_not_taken_last)),
            TextTable("Forecast", ("Quantity", "Prediction"), forecast),
        ],
        texts=(
            {"Recipe with these changes": write_recipe(plan.recipe)} if plan.recipe.object_options is not None else {}
        ),
        source=source,
    ).render()


def _limited(peak: Estimate, limit: float) -> str:
    return f"{scaled(peak.value, 'B')} of {scaled(limit, 'B')}"


def _parts(footprint: Footprint) -> dict[str, float]:
    return {part: size for part in COMPONENTS if (size := getattr(footprint, part))}


def _headline(plan: Plan) -> str:
    changes = ", ".join(option.label for option in plan.chosen.options)
    return f"Change: {changes}" if changes else "Keep the recipe unchanged: no candidate that fits is faster"


def _not_taken_last(reason: tuple[str, str, str]) -> tuple[bool, str]:
    return reason[1] == NOT_TAKEN, reason[0]


def _candidates(title: str, plan: Plan, candidates: Candidates) -> TextTable:
    rows = [
        (
            f"→ {candidate.label}" if candidate.options == plan.chosen.options else candidate.label,
            scaled(forecast.process + forecast.memory.value, "B"),
            duration(forecast.step.value),
            scaled(forecast.tokens_per_second.value),
            duration(forecast.seconds.value),
        )
        for candidate, forecast in candidates
    ]
    columns = ("Candidate", "Memory", "Step", f"{plan.forecast.unit}/s", "Time to the budget")
    return TextTable(title, columns, rows, frozenset(range(1, len(columns))))


def _layouts(title: str, plan: ClusterPlan, placed: Sequence[PlacedLayout]) -> TextTable:
    rows = [
        (
            f"→ {each.layout.label}" if each is plan.chosen else each.layout.label,
            scaled(each.footprint.memory, "B"),
            duration(each.layout.seconds),
            scaled(plan.tokens / each.layout.seconds),
        )
        for each in placed
    ]
    return TextTable(title, ("Layout", "Memory", "Step", "tokens/s"), rows, frozenset({1, 2, 3}))
