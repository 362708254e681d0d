"""CPU seconds of folders of tests: children are counted, and only what is far above its budget is an excess."""

import subprocess
import sys

from folder_budgets import BUDGETS, budget_lines, excesses, family_seconds


def test_processes_that_ended_are_counted() -> None:
    before = family_seconds()
    work = "import time\nwhile time.process_time() < 0.4: pass"
    subprocess.run([sys.executable, "-c", work], check=True)
    assert 0.3 < family_seconds() - before < 30


def test_a_folder_three_times_above_its_budget_is_an_excess() -> None:
    budgets = {"core": 30.0, "pairs": 30.0, "docs": 1.0}
    assert excesses({"core": 91.0, "pairs": 89.0, "docs": 59.0, "new": 1000.0}, budgets) == ["core"]
    assert excesses({"docs": 61.0}, budgets) == ["docs"]
    lines = budget_lines({"core": 31.4, "pairs": 40.0}, budgets)
    assert [line.split() for line in lines] == [
        ["pairs", "40", "of", "30"],
        ["core", "31", "of", "30"],
        ["all", "71", "of", "61"],
    ]


def test_all_budgets_together_are_eleven_minutes_of_two_cores() -> None:
    assert sum(BUDGETS.values()) <= 2 * 11 * 60
