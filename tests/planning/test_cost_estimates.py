"""Counts, lines through probes, and intervals."""

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_runs import CATALOGUE
from tiny_runs import plain_run, with_optimizer

from thrifty.composition.compose import compose
from thrifty.composition.explain import explain
from thrifty.core.footprint import Footprint
from thrifty.core.recipe import CheckpointSettings
from thrifty.planning import step_timing
from thrifty.planning.cost_estimates import Estimate, StepTiming, count_footprint, largest_part, line_through
from thrifty.planning.disk_usage import disk_bytes
from thrifty.planning.probe_jobs import sizes
from thrifty.planning.step_timing import time_steps


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["memory.recompute", "measure.noise_scale", "memory.offload_optimizer"])
def test_one_trace_counts_what_an_explanation_ends_with(name: str) -> None:
    settings = {"every": 2} if name == "measure.noise_scale" else {}
    run = compose(plain_run(batch=4), with_optimizer([CATALOGUE[name](**settings)]), 6)
    assert count_footprint(run) == explain(run).footprint


@given(st.floats(0.01, 1), st.floats(0.001, 1), st.integers(2, 40))
def test_sizes_between_those_that_were_run_lie_on_their_line(fixed: float, slope: float, rows: int) -> None:
    sizes = (1, 10, 40)
    once = line_through(sizes, [fixed + slope * size for size in sizes])
    assert once(rows) == pytest.approx(fixed + slope * rows, rel=1e-6)


def test_where_noise_outweighs_the_sizes_time_is_in_proportion_to_the_largest() -> None:
    assert line_through((2, 4), (5.0, 3.0))(8) == 6.0
    assert line_through((4,), (3.0,))(8) == 6.0


def test_a_step_is_its_micro_batches_the_smaller_last_one_too_and_one_update() -> None:
    timing = StepTiming((2, 4), (3.0, 5.0), (2.0, 4.0), 0.5, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert timing.step(8, 2) == 2 * 5 + 0.5
    assert timing.step(10, 3) == 2 * 5 + 3 + 0.5
    assert timing.least_step(8, 4) == 4 * 2 + 0.5
    assert StepTiming.from_dict(timing.as_dict()) == timing


def test_of_gradients_and_activations_only_the_larger_can_be_most_of_the_peak() -> None:
    assert largest_part(Footprint(gradients=5, activations=6, temporary=4)) == ("activations", 0.6)
    assert largest_part(Footprint(gradients=5, activations=4, temporary=5.5))[0] == "temporary"


def test_a_rate_has_its_bounds_the_other_way_round() -> None:
    assert Estimate(2.0, 1.0, 4.0).over(8.0) == Estimate(4.0, 2.0, 8.0)


def test_a_probe_runs_whole_steps_and_says_what_they_took() -> None:
    run = compose(plain_run(batch=4), with_optimizer([]), 20)
    held_out = [run.source.at(0)]
    timing = time_steps(run, (1, 2), 2, held_out, 0.1)
    assert timing.rows == (1, 2) and all(
        0 < low <= middle for low, middle in zip(timing.least, timing.passes, strict=True)
    )
    assert 0 < timing.update < timing.startup and timing.evaluation > 0 and timing.save > 0 and timing.memory >= 0


def test_a_probe_leaves_the_smaller_sizes_out_where_the_largest_is_too_slow() -> None:
    run = compose(plain_run(batch=4), with_optimizer([]), 20)
    timing = time_steps(run, (1, 2, 4), 1, [run.source.at(0)], 0.1, bar=1e-9)
    assert timing.rows == (4,) and timing.evaluation > 0 and timing.memory >= 0


def test_an_evaluation_is_told_by_a_few_of_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[int] = []

    def evaluated(model: object, objective: object, batches: list[object], device: object) -> None:
        judged.append(len(batches))
        time.sleep(0.01 * len(batches))

    monkeypatch.setattr(step_timing, "evaluate", evaluated)
    run = compose(plain_run(batch=4), with_optimizer([]), 20)
    timing = time_steps(run, (4,), 1, [run.source.at(step) for step in range(10)], 0.0)
    assert judged == [1, 2] and timing.evaluation >= 0.1


def test_only_the_plan_s_own_size_is_tried_where_micro_batches_may_not_change() -> None:
    assert sizes(8, 1, compiled=False) == (2, 4, 8) and sizes(8, 2, compiled=True) == (2, 4)
    assert sizes(8, 2, compiled=False, fixed=True) == (4,)


def test_what_a_run_writes_is_the_checkpoints_that_are_there_at_once_and_the_prepared_data() -> None:
    kept = CheckpointSettings(keep=2, extra_steps=(0.5,))
    footprint = Footprint(parameters=40.0, buffers=2.0, gradients=40.0, optimizer=80.0)
    assert disk_bytes(kept, footprint, [], 7.0) == {"checkpoints": 5 * 122.0, "prepared data": 7.0}
    outside = replace(footprint, optimizer=0.0)
    found = disk_bytes(kept, outside, [CATALOGUE["memory.offload_optimizer"]()], 0.0)
    assert found == {"checkpoints": 5 * 122.0, "optimizer state": 80.0}
