"""Cores used by other processes during probes, and the treatment of disturbed step times."""

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
    """Fake clocks in seconds: CPU time of all processes, and of this process."""

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


def test_cores_of_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    watched = CpuContention()
    clocks.run(10.0, all_cores=2.0, own=0.9)
    assert watched.taken() == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("seconds", "all_cores", "own", "taken"), [(10.0, 1.0, 1.2, 0.0), (10.0, 9.0, 0.0, 2.0), (0.1, 2.0, 0.0, 0.0)]
)
def test_cores_of_other_processes_are_clamped(
    monkeypatch: pytest.MonkeyPatch, seconds: float, all_cores: float, own: float, taken: float
) -> None:
    clocks = Clocks(monkeypatch)
    watched = CpuContention()
    clocks.run(seconds, all_cores, own)
    assert watched.taken() == taken


def test_child_processes_are_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", WORK])
    try:
        time.sleep(0.2)
        ours = CpuContention()
        before = cpu_contention._own_work(ours.head)
        time.sleep(1.0)
        spent = cpu_contention._own_work(ours.head) - before
        counted = ours.taken()
        monkeypatch.setattr(cpu_contention, "_own_work", lambda head: 0.0)
        ours.own = 0.0
        assert ours.taken() > counted  # without subtraction, the child's work counts as another process's
        assert spent > 0.02
    finally:
        child.kill()
        child.wait()


def test_other_ranks_are_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CpuContention().head == os.getpid()
    monkeypatch.setattr(cpu_contention, "ranks", lambda: 2)
    assert CpuContention().head == os.getppid()  # torchrun, the parent of all ranks


def job(**how: float) -> ProbeJob:
    return ProbeJob({"name": "a"}, 10, (BATCH,), 1, 1.0, (5.0, 6.0), **how)


def test_disturbed_probes_are_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))
    made = [DISTURBED, TIMING, DISTURBED]
    result = cache_probe(lambda job: made.pop(0), "cpu")
    assert [result(job()) for _ in range(3)] == [DISTURBED, TIMING, TIMING]


def test_higher_bars_measure_skipped_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))
    whole = replace(TIMING, rows=(BATCH // 2, BATCH), passes=(0.5, 1.0), least=(0.5, 1.0))
    made = [TIMING, whole]
    result = cache_probe(lambda job: made.pop(0), "cpu")
    plan_request = ProbeJob({"name": "a"}, 10, (BATCH // 2, BATCH), 1, 1.0, (5.0, 6.0))
    timings = [result(replace(plan_request, bar=1.0)) for _ in range(2)]  # a step takes 1.25 s
    assert timings == [TIMING, TIMING] and result(replace(plan_request, bar=2.0)) == result(plan_request) == whole


def test_disturbed_step_times_are_upper_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def explainer(timing: StepTiming) -> tuple[str, dict[str, float]]:
        chosen = candidate(timing)
        forecast = PLANNER.forecast(chosen, Budget(steps=10), NONE)
        plan = Plan(PLANNER.recipe, chosen, forecast, ((chosen, forecast),), {}, (), NONE)
        step = next(line for line in format_plan(plan) if line.startswith("step"))
        assert forecast.as_dict()["other_work"]["cores"] == (1.1 if timing.is_disturbed else 0.0)
        assert (forecast.step.low < 0.6) == timing.is_disturbed and forecast.step.high == pytest.approx(1.25 * 1.15)
        return step, _expected(plan)

    step, expected = explainer(DISTURBED)
    assert "measured while other processes used 1.1 of 2 cores: step times are upper bounds" in step
    assert expected.keys() == {"memory"}
    step, expected = explainer(replace(TIMING, others=0.1, cores=2))
    assert "other processes" not in step and expected.keys() == {"memory", "step"}
    assert math.isclose(expected["step"], 1.25)
