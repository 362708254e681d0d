"""Moments of a run as fractions and as numbers of steps."""

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
    ("moment", "steps", "expected"),
    [(0.05, 1000, 50), (50, 1000, 50), (1.0, 30, 30), (1, 30, 1), (0.0, 30, 0), (0.5, 3, 2)],
)
def test_float_is_a_fraction_of_the_run_and_int_is_steps(moment: float, steps: int, expected: int) -> None:
    assert in_steps(moment, steps) == expected
    assert isinstance(in_steps(moment, steps), int)


def test_only_moments_are_resolved_to_steps() -> None:
    assert resolve_moments(Settings(), 400) == Settings(warmup=20, at=(50, 300), rate=0.5, every=7)


def test_resolving_is_idempotent() -> None:
    once = resolve_moments(Settings(), 400)
    assert resolve_moments(once, 10_000) == once


class Sized(Technique):
    batch: EffectiveBatch = 0


def test_unset_effective_batch_is_the_runs() -> None:
    assert resolve_moments(Sized(), 400, 32) == Sized(batch=32)
    assert resolve_moments(Sized(batch=8), 400, 32) == Sized(batch=8)
    with pytest.raises(UsageError, match="batch is -1"):
        Sized(batch=-1)
