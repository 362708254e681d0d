"""The page of a plan: the choice, its reasons, memory against the limit, and everything considered."""

from dataclasses import replace
from pathlib import Path

from planned_runs import MB, NONE, PLANNER, by_expectation, recipe, searching

from thrifty.core.recipe import Budget
from thrifty.interface.plans import RecipePlan
from thrifty.planning.choice_explanations import ChoiceReason
from thrifty.planning.planner import Plan


def planned(memory: float) -> RecipePlan:
    """Return a plan of the tiny recipe for `memory` MB, with formulas instead of counts and probes."""
    search = searching(memory, time=by_expectation)
    chosen = search.run()
    found = [(each, PLANNER.forecast(each, Budget(steps=100), NONE)) for each in search.ranked()]
    reasons = (
        ChoiceReason("memory.recompute", "added", "alone it needs 40% less <peak> memory"),
        ChoiceReason("optimizers.muon", "not taken", "a different algorithm"),
    )
    forecast = next(forecast for each, forecast in found if each.options == chosen.options)
    forecast = replace(forecast, process=50 * MB)
    misfits = {"the unchanged recipe": "1,000 MB"}
    return RecipePlan(Plan(recipe(), chosen, forecast, tuple(found), misfits, reasons, NONE, limit=memory * MB))


def test_page_has_choice_reason_memory_and_steps(tmp_path: Path) -> None:
    plan = planned(700)
    page = plan.write_page(tmp_path / "plans" / "mine.html").read_text()
    choice, reason, memory, near, considered = (
        page.index(words)
        for words in (
            "Change: ",
            "40% less &lt;peak&gt; memory",
            ">Predicted memory<",
            "Near candidates",
            "<details><summary>All techniques",
        )
    )
    assert choice < reason < memory < near < considered
    assert (
        "700 MB" in page and "not taken" in page[considered:] and page.count("<figure") == 2 and "<script" not in page
    )
    assert f"page: {tmp_path / 'plans' / 'mine.html'}" in str(plan).replace("\n", "")


def test_a_second_page_keeps_the_first(tmp_path: Path) -> None:
    plan, first = planned(700), tmp_path / "mine.html"
    first.write_text("mine")
    assert plan.write_page(first).name == "mine-2.html" and first.read_text() == "mine"
