"""What other programs take of a machine while probes run, and what becomes of a time measured beside them."""

import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from planned_runs import BATCH, NONE, PLANNER, TIMING, candidate

from thrifty.core.recipe import Budget
from thrifty.interface.plan_on_machine import _expected
from thrifty.interface.plan_output import format_plan
from thrifty.machine import cpu_contention
from thrifty.machine.cpu_contention import CpuContention
from thrifty.planning.cost_estimates import StepTiming
from thrifty.planning.planner import Plan
from thrifty.planning.probe_jobs import ProbeJob, cache_probe

DISTURBED = replace(TIMING, others=1.1, cores=2)
WORK = "import time; end = time.time() + 30\nwhile time.time() < end: pass"


class Clocks:
    """Seconds of work of all programs, and of this one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.all = self.own = 0.0
        monkeypatch.setattr(cpu_contention, "_all_work", lambda cores: self.all)
        monkeypatch.setattr(cpu_contention, "_own_work", lambda head: self.own)
        monkeypatch.setattr(cpu_contention, "usable_cores", lambda: [0, 1])
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def run(self, seconds: float, all_cores: float, own: float) -> None:
        self.now += seconds
        self.all += all_cores * seconds
        self.own += own * seconds


def test_others_take_what_all_programs_do_less_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    watched = CpuContention()
    clocks.run(10.0, all_cores=2.0, own=0.9)
    assert watched.taken() == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("seconds", "all_cores", "own", "taken"), [(10.0, 1.0, 1.2, 0.0), (10.0, 9.0, 0.0, 2.0), (0.1, 2.0, 0.0, 0.0)]
)
def test_they_take_no_less_than_nothing_and_no_more_than_there_is(
    monkeypatch: pytest.MonkeyPatch, seconds: float, all_cores: float, own: float, taken: float
) -> None:
    clocks = Clocks(monkeypatch)
    watched = CpuContention()
    clocks.run(seconds, all_cores, own)
    assert watched.taken() == taken


def test_a_process_that_is_not_ours_is_seen_and_our_own_child_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", WORK])
    try:
        time.sleep(0.2)
        ours = CpuContention()
        before = cpu_contention._own_work(ours.head)
        time.sleep(1.0)
        spent = cpu_contention._own_work(ours.head) - before
        beside = ours.taken()
        monkeypatch.setattr(cpu_contention, "_own_work", lambda head: 0.0)
        ours.own = 0.0
        assert ours.taken() > beside  # what the child did counts as ours, and as another's when it is not taken off
        assert spent > 0.02
    finally:
        child.kill()
        child.wait()


def test_what_other_ranks_do_is_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CpuContention().head == os.getpid()
    monkeypatch.setattr(cpu_contention, "ranks", lambda: 2)
    assert CpuContention().head == os.getppid()  # torchrun, which started them all


def job(**how: float) -> ProbeJob:
    return ProbeJob({"name": "a"}, 10, (BATCH,), 1, 1.0, (5.0, 6.0), **how)


def test_a_time_measured_beside_other_work_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))
    made = [DISTURBED, TIMING, DISTURBED]
    found = cache_probe(lambda job: made.pop(0), "cpu")
    assert [found(job()) for _ in range(3)] == [DISTURBED, TIMING, TIMING]


def test_what_the_bar_left_out_is_measured_where_the_bar_is_higher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))
    whole = replace(TIMING, rows=(BATCH // 2, BATCH), passes=(0.5, 1.0), least=(0.5, 1.0))
    made = [TIMING, whole]
    found = cache_probe(lambda job: made.pop(0), "cpu")
    asked = ProbeJob({"name": "a"}, 10, (BATCH // 2, BATCH), 1, 1.0, (5.0, 6.0))
    behind = [found(replace(asked, bar=1.0)) for _ in range(2)]  # a step takes 1.25 s
    assert behind == [TIMING, TIMING] and found(replace(asked, bar=2.0)) == found(asked) == whole


def test_a_forecast_says_that_its_step_is_an_upper_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(timing: StepTiming) -> tuple[str, dict[str, float]]:
        chosen = candidate(timing)
        forecast = PLANNER.forecast(chosen, Budget(steps=10), NONE)
        plan = Plan(PLANNER.recipe, chosen, forecast, ((chosen, forecast),), {}, (), NONE)
        step = next(line for line in format_plan(plan) if line.startswith("step"))
        assert forecast.as_dict()["other_work"]["cores"] == (1.1 if timing.is_disturbed else 0.0)
        assert (forecast.step.low < 0.6) == timing.is_disturbed and forecast.step.high == pytest.approx(1.25 * 1.15)
        return step, _expected(plan)

    step, expected = told(DISTURBED)
    assert "measured while other work took 1.1 of 2 cores: step times are upper bounds" in step
    assert expected.keys() == {"memory"}
    step, expected = told(replace(TIMING, others=0.1, cores=2))
    assert "other work" not in step and expected.keys() == {"memory", "step"}
    assert math.isclose(expected["step"], 1.25)
