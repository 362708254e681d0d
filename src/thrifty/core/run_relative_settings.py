"""Settings relative to a run: moments in time, and the effective batch.

A float moment is a fraction of the whole run; an int is a number of steps. `warmup: StepOrFraction = 0.05` means the
first twentieth of the run, `warmup = 200` means 200 steps. `batch: EffectiveBatch = 0` means the run's effective batch.
Composing a run replaces both, so that techniques receive only steps and examples.
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
    """Return a copy of a dataclass whose moments are steps of a run of `steps`. These are fields annotated
    `StepOrFraction`, or a tuple of them. An `EffectiveBatch` of 0 becomes `batch`."""
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
    """Raise UsageError if a moment is still a fraction of a run, since the number of steps is unknown outside a run."""
    hints = hints_of(type(value))
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        current, hint = getattr(value, field.name), hints[field.name]
        moments = (current,) if hint == StepOrFraction else current if hint == tuple[StepOrFraction, ...] else ()
        if any(isinstance(moment, float) for moment in moments):
            steps = 1000 if hint == StepOrFraction else (1000,) * len(moments)
            raise UsageError(
                f"{name}: {field.name} is {current}, a fraction of a run, and the number of steps is unknown here",
                fix=f"pass total_steps=…, the steps of your loop, or a number of steps, such as {field.name}={steps}",
            )


def refuse_unknown_batch(value: object, name: str) -> None:
    """Raise UsageError if a setting means the run's effective batch, which is unknown outside a run."""
    hints = hints_of(type(value))
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        if hints[field.name] == EffectiveBatch and not getattr(value, field.name):
            raise UsageError(f"{name}: the effective batch is unknown here", fix=f"set it, such as {field.name}=256")
