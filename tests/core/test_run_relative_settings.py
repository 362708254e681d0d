"""Moments of a run: fractions and steps."""

from dataclasses import dataclass

import pytest

from thrifty.core.errors import UsageError
from thrifty.core.run_relative_settings import EffectiveBatch, StepOrFraction, in_steps, resolve_moments
from thrifty.core.technique import Technique


@dataclass(frozen=True)
class Settings:
    warmup: StepOrFraction = 0.05
    at: tuple[StepOrFraction, ...] = (0.125, 300)
    rate: float = 0.5
    every: int = 7


@pytest.mark.parametrize(
    ("moment", "steps", "found"),
    [(0.05, 1000, 50), (50, 1000, 50), (1.0, 30, 30), (1, 30, 1), (0.0, 30, 0), (0.5, 3, 2)],
)
def test_a_fraction_is_of_the_run_and_a_whole_number_is_steps(moment: float, steps: int, found: int) -> None:
    assert in_steps(moment, steps) == found
    assert isinstance(in_steps(moment, steps), int)


def test_every_moment_of_a_value_is_turned_into_steps_and_nothing_else() -> None:
    assert resolve_moments(Settings(), 400) == Settings(warmup=20, at=(50, 300), rate=0.5, every=7)


def test_what_is_resolved_stays_as_it_is() -> None:
    once = resolve_moments(Settings(), 400)
    assert resolve_moments(once, 10_000) == once


class Sized(Technique):
    batch: EffectiveBatch = 0


def test_an_effective_batch_that_is_left_open_is_the_runs_own() -> None:
    assert resolve_moments(Sized(), 400, 32) == Sized(batch=32)
    assert resolve_moments(Sized(batch=8), 400, 32) == Sized(batch=8)
    with pytest.raises(UsageError, match="batch is -1"):
        Sized(batch=-1)
