"""Settings relative to a run: moments in time, and the effective batch size.

A moment that is a float is a fraction of the whole run. A moment that is an int is a number of steps. `warmup:
StepOrFraction = 0.05` is the first twentieth of the run, and `warmup = 200` is 200 steps. `batch: EffectiveBatch = 0`
is the run's effective batch size. Composing a run replaces both settings, so techniques receive only steps and
examples.
"""

import dataclasses
from typing import Annotated, Any, TypeVar

from thrifty.core.errors import UsageError
from thrifty.core.setting_bounds import SettingBound, hints_of

StepOrFraction = Annotated[int | float, "moment of a run"]
EffectiveBatch = Annotated[int, "effective batch of a run", SettingBound(least=0)]
T = TypeVar("T")


def in_steps(moment: int | float, steps: int) -> int:
    return moment if isinstance(moment, int) else round(moment * steps)


def resolve_moments(value: T, steps: int, batch: int = 0) -> T:
    """Return a copy of a dataclass with each moment as a step of a run of `steps` steps. Moments are fields annotated
    `StepOrFraction` or a tuple of `StepOrFraction`. An `EffectiveBatch` of 0 becomes `batch`."""
    hints = hints_of(type(value))
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        current = getattr(value, field.name)
        if hints[field.name] == StepOrFraction:
            changes[field.name] = in_steps(current, steps)
        elif hints[field.name] == tuple[StepOrFraction, ...]:
            changes[field.name] = tuple(in_steps(moment, steps) for moment in current)
        elif hints[field.name] == EffectiveBatch:
            changes[field.name] = current or batch
    return dataclasses.replace(value, **changes)  # type: ignore[type-var]


def refuse_shares(value: object, name: str) -> None:
    """Raise UsageError if a moment is a fraction of a run, since the number of steps is unknown outside a run."""
    hints = hints_of(type(value))
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        current, hint = getattr(value, field.name), hints[field.name]
        moments = (current,) if hint == StepOrFraction else current if hint == tuple[StepOrFraction, ...] else ()
        if any(isinstance(moment, float) for moment in moments):
            steps = 1000 if hint == StepOrFraction else (1000,) * len(moments)
            raise UsageError(
                f"{name}: {field.name} is {current}, a fraction of a run, but the number of steps is unknown",
                fix=f"pass total_steps=N, the number of steps of your loop; or {field.name}={steps}",
            )


def refuse_unknown_batch(value: object, name: str) -> None:
    """Raise UsageError if a setting is 0 for the run's effective batch, which is unknown outside a run."""
    hints = hints_of(type(value))
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        if hints[field.name] == EffectiveBatch and not getattr(value, field.name):
            raise UsageError(f"{name}: the effective batch of your loop is unknown", fix=f"{field.name}=256")
