"""CPU seconds of folders of tests: children are counted, and a folder above its share is marked."""

import subprocess
import sys

from folder_budgets import BUDGETS, budget_lines, family_seconds


def test_processes_that_ended_are_counted() -> None:
    before = family_seconds()
    work = "import time\nwhile time.process_time() < 0.4: pass"
    subprocess.run([sys.executable, "-c", work], check=True)
    assert 0.3 < family_seconds() - before < 30


def test_folders_above_their_share_are_marked_at_any_speed() -> None:
    budgets = {"core": 30.0, "pairs": 60.0, "docs": 1.0}
    for speed in 0.5, 3.0:
        seconds = {"core": 90 * speed, "pairs": 60 * speed, "docs": 1.5 * speed}
        lines = budget_lines(seconds, budgets)
        assert [line.split()[0] for line in lines] == ["core", "pairs", "docs", "all"]
        assert [line.endswith("more than its share") for line in lines] == [True, False, False, False]
    assert lines[0].split()[1:7] == ["270", "of", "30", "59%", "of", "33%"]


def test_a_partial_run_is_compared_with_its_own_budgets() -> None:
    lines = budget_lines({"pairs": 40.0, "collection": 20.0}, {"pairs": 60.0, "collection": 30.0, "techniques": 300.0})
    assert not any(line.endswith("more than its share") for line in lines)


def test_all_budgets_together_are_eleven_minutes_of_two_cores() -> None:
    assert sum(BUDGETS.values()) <= 2 * 11 * 60
