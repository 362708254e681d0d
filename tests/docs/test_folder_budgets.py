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
    budgets = {"core": 10.0, "pairs": 10.0, "docs": 10.0}
    assert excesses({"core": 31.0, "pairs": 29.0, "new": 1000.0}, budgets) == ["core"]
    lines = budget_lines({"core": 31.4, "pairs": 40.0}, budgets)
    assert [line.split() for line in lines] == [
        ["pairs", "40", "of", "10"],
        ["core", "31", "of", "10"],
        ["all", "71", "of", "30"],
    ]


def test_all_budgets_together_are_eleven_minutes_of_two_cores() -> None:
    assert sum(BUDGETS.values()) <= 2 * 11 * 60
