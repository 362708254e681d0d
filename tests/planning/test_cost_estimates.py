"""Counted footprints, interpolated step times, and intervals."""

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
from thrifty.planning.probe_jobs import sizes
from thrifty.planning.step_timing import time_steps
from thrifty.training.required_room import disk_bytes


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["memory.recompute", "measure.noise_scale", "memory.offload_optimizer"])
def test_counted_footprints_equal_the_last_of_an_explanation(name: str) -> None:
    settings = {"every": 2} if name == "measure.noise_scale" else {}
    run = compose(plain_run(batch=4), with_optimizer([CATALOGUE[name](**settings)]), 6)
    assert count_footprint(run) == explain(run).footprint


@given(st.floats(0.01, 1), st.floats(0.001, 1), st.integers(2, 40))
def test_seconds_between_sizes_are_interpolated(fixed: float, slope: float, rows: int) -> None:
    sizes = (1, 10, 40)
    once = line_through(sizes, [fixed + slope * size for size in sizes])
    assert once(rows) == pytest.approx(fixed + slope * rows, rel=1e-6)


def test_noisy_seconds_are_proportional_to_the_largest_size() -> None:
    assert line_through((2, 4), (5.0, 3.0))(8) == 6.0
    assert line_through((4,), (3.0,))(8) == 6.0


def test_step_seconds_by_micro_batches_and_update() -> None:
    timing = StepTiming((2, 4), (3.0, 5.0), (2.0, 4.0), 0.5, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert timing.step(8, 2) == 2 * 5 + 0.5
    assert timing.step(10, 3) == 2 * 5 + 3 + 0.5
    assert timing.least_step(8, 4) == 4 * 2 + 0.5
    assert StepTiming.from_dict(timing.as_dict()) == timing


def test_largest_part_of_the_peak() -> None:
    assert largest_part(Footprint(gradients=5, activations=6, temporary=4)) == ("activations", 0.6)
    assert largest_part(Footprint(gradients=5, activations=4, temporary=5.5))[0] == "temporary"


def test_rates_swap_their_bounds() -> None:
    assert Estimate(2.0, 1.0, 4.0).over(8.0) == Estimate(4.0, 2.0, 8.0)


def test_probes_time_whole_steps() -> None:
    run = compose(plain_run(batch=4), with_optimizer([]), 20)
    held_out = [run.source.at(0)]
    timing = time_steps(run, (1, 2), 2, held_out, 0.1)
    assert timing.rows == (1, 2) and all(
        0 < low <= middle for low, middle in zip(timing.least, timing.passes, strict=True)
    )
    assert 0 < timing.update < timing.startup and timing.evaluation > 0 and timing.save > 0 and timing.memory >= 0


def test_probes_skip_smaller_sizes_above_the_bar() -> None:
    run = compose(plain_run(batch=4), with_optimizer([]), 20)
    timing = time_steps(run, (1, 2, 4), 1, [run.source.at(0)], 0.1, bar=1e-9)
    assert timing.rows == (4,) and timing.evaluation > 0 and timing.memory >= 0


def test_evaluation_time_is_estimated_from_few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[int] = []

    def evaluated(model: object, objective: object, batches: list[object], device: object) -> None:
        judged.append(len(batches))
        time.sleep(0.01 * len(batches))

    monkeypatch.setattr(step_timing, "evaluate", evaluated)
    run = compose(plain_run(batch=4), with_optimizer([]), 20)
    timing = time_steps(run, (4,), 1, [run.source.at(step) for step in range(10)], 0.0)
    assert judged == [1, 2] and timing.evaluation >= 0.1


def test_micro_batch_sizes_of_a_probe() -> None:
    assert sizes(8, 1, compiled=False) == (2, 4, 8) and sizes(8, 2, compiled=True) == (2, 4)
    assert sizes(8, 2, compiled=False, fixed=True) == (4,)


def test_disk_usage_of_checkpoints_and_data() -> None:
    kept = CheckpointSettings(keep=2, extra_steps=(0.5,))
    footprint = Footprint(parameters=40.0, buffers=2.0, gradients=40.0, optimizer=80.0)
    assert disk_bytes(kept, footprint, [], 7.0) == {"checkpoints": 5 * 122.0, "prepared data": 7.0}
    outside = replace(footprint, optimizer=0.0)
    result = disk_bytes(kept, outside, [CATALOGUE["memory.offload_optimizer"]()], 0.0)
    assert result == {"checkpoints": 5 * 122.0, "optimizer state": 80.0}
