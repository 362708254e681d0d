"""Learning-rate schedules: warm-up, peak, end."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some
from tiny_runs import plain_run, run_through, technique

from thrifty import techniques
from thrifty.core.gradient_transform import GradientTransform
from thrifty.core.run_relative_settings import resolve_moments
from thrifty.core.technique import Technique
from thrifty.techniques.schedules._warmup import warmed_up

SCHEDULES = [name for name in techniques.names() if name.startswith("schedules.")]


def factors(schedule: Technique, steps: int, beyond: int = 0) -> list[float]:
    transform = resolve_moments(schedule, steps).update(GradientTransform())
    return [value for step in range(steps + beyond) for value in transform.scalars(step, step).values()]


@pytest.fixture(params=SCHEDULES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("steps", [20, 100, 1000])
def test_linear_warmup_to_one_and_decay_to_zero(name: str, steps: int) -> None:
    rates = factors(technique(name), steps, beyond=5)
    warmup = round(0.05 * steps)
    assert rates[:warmup] == pytest.approx([(step + 1) / warmup for step in range(warmup)])
    assert max(rates) == pytest.approx(1.0) and min(rates[:steps]) > 0
    assert rates[steps:] == [0.0] * 5
    assert rates[steps - 1] <= 5 / steps
    after = rates[warmup - 1 :]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(after))


@given(name=some.sampled_from(SCHEDULES), warmup=some.integers(0, 30), steps=some.integers(1, 60))
def test_factors_lie_between_zero_and_one(name: str, warmup: int, steps: int) -> None:
    rates = factors(technique(name, warmup=warmup), steps, beyond=10)
    assert all(0 <= factor <= 1 for factor in rates)
    assert rates[0] > 0


@pytest.mark.parametrize("name", ["schedules.linear", "schedules.cosine"])
def test_schedule_ends_at_its_floor(name: str) -> None:
    rates = factors(technique(name, warmup=0, floor=0.1), 50, beyond=5)
    assert rates[0] == 1.0
    assert rates[50:] == pytest.approx([0.1] * 5)
    assert min(rates) == pytest.approx(0.1)


def test_shape_receives_progress_from_zero_to_one() -> None:
    factors = [warmed_up(step, 2, 6, lambda progress: progress) for step in range(9)]
    assert factors == [0.5, 1.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert [warmed_up(step, 0, 0, lambda progress: progress) for step in range(2)] == [0.0, 1.0]


def test_known_values() -> None:
    cosine = factors(technique("schedules.cosine", warmup=0), 4)
    assert cosine == pytest.approx([1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5])
    linear = factors(technique("schedules.linear", warmup=0), 4)
    assert linear == pytest.approx([1.0, 0.75, 0.5, 0.25])
    root = factors(technique("schedules.inverse_square_root", warmup=4, cooldown=100), 100)
    assert root[3] == 1.0 and root[15] == pytest.approx(0.5) and root[63] == pytest.approx(0.25)
    constant = factors(technique("schedules.constant_then_decay", warmup=0, decay_from=6), 10)
    assert constant == pytest.approx([1.0] * 7 + [0.75, 0.5, 0.25])


def test_recorded_learning_rate_is_the_scheduled_one() -> None:
    chosen = [technique("optimizers.adamw", lr=0.01), technique("schedules.linear", warmup=2)]
    records, _ = run_through(plain_run(depth=1), chosen, 6)
    assert [record.learning_rate for record in records] == pytest.approx([0.005, 0.01, 0.01, 0.0075, 0.005, 0.0025])
