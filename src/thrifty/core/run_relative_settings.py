"""Settings relative to a run: moments in time, and the effective batch size.

A moment that is a float is a fraction of the whole run. A moment that is an int is a number of steps. `warmup:
StepOrFraction = 0.05` is the first twentieth of the run, and `warmup = 200` is 200 steps. `batch: EffectiveBatch = 0`
is the run's effective batch size. Composing a run replaces both settings, so techniques receive only steps and
examples.
"""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

from thrifty.core.errors import UsageError
from thrifty.core.setting_bounds import SettingBound, hints_of

StepOrFraction = Annotated[int | float, "moment of a run"]
"""Moment of a run (a step, or a fraction of the run) that is fixed when the run is composed."""
MovingMoment = Annotated[int | float, "moment of a run", "moves with its length"]
"""Moment of a run that moves if the number of steps changes during the run (`move_moments`). A fraction stays the same
fraction. Techniques must read the setting at each step."""
EffectiveBatch = Annotated[int, "effective batch of a run", SettingBound(least=0)]
T = TypeVar("T")


_MOMENTS = (StepOrFraction, MovingMoment)


def is_moment(hint: Any) -> bool:
    """Return True for the annotation of one moment."""
    return hint in _MOMENTS


def moments_of(value: object) -> Iterator[tuple[str, Any, bool]]:
    """Yield the name, the value, and True if the moment moves, for each field of one or several moments."""
    hints = hints_of(type(value))
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        for kind in _MOMENTS:
            if hints[field.name] in (kind, tuple[kind, ...]):
                yield field.name, getattr(value, field.name), kind == MovingMoment


def _resolved(moment: Any, steps: int) -> Any:
    return tuple(in_steps(each, steps) for each in moment) if isinstance(moment, tuple) else in_steps(moment, steps)


def in_steps(moment: int | float, steps: int) -> int:
    return moment if isinstance(moment, int) else round(moment * steps)


def resolve_moments(value: T, steps: int, batch: int = 0) -> T:
    """Return a copy of a dataclass with each moment as a step of a run of `steps` steps. Moments are fields annotated
    `StepOrFraction`, `MovingMoment`, or a tuple of one of them. An `EffectiveBatch` of 0 becomes `batch`."""
    hints = hints_of(type(value))
    changes = {name: _resolved(moment, steps) for name, moment, _ in moments_of(value)}
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        if hints[field.name] == EffectiveBatch:
            changes[field.name] = getattr(value, field.name) or batch
    return dataclasses.replace(value, **changes)  # type: ignore[type-var]


def move_moments(resolved: object, requested: object, steps: int, now: int, end: int) -> None:
    """Move the moments of `resolved` that are after step `now`, or at the old `end`, to a run of `steps` steps, in
    place. `requested` has the settings before `resolve_moments`. Other moments, and moments in steps, stay."""

    def moved(old: int, moment: int | float) -> int:
        return max(in_steps(moment, steps), now) if old > now or old == end else old

    for name, moment, moves in moments_of(requested):
        if moves:
            old = getattr(resolved, name)
            new = tuple(map(moved, old, moment)) if isinstance(moment, tuple) else moved(old, moment)
            object.__setattr__(resolved, name, new)


def fixed_moments(resolved: object) -> dict[str, int]:
    """Return the latest step of each field whose moments do not move, by name."""
    fixed = {name: moment for name, moment, moves in moments_of(resolved) if not moves}
    return {name: max(moment, default=0) if isinstance(moment, tuple) else moment for name, moment in fixed.items()}


def refuse_shares(value: object, name: str) -> None:
    """Raise UsageError if a moment is a fraction of a run, since the number of steps is unknown outside a run."""
    for field, current, _ in moments_of(value):
        moments = current if isinstance(current, tuple) else (current,)
        if any(isinstance(moment, float) for moment in moments):
            steps = (1000,) * len(moments) if isinstance(current, tuple) else 1000
            raise UsageError(
                f"{name}: {field} is {current}, a fraction of a run, but the number of steps is unknown",
                fix=f"pass total_steps=N, the number of steps of your loop; or {field}={steps}",
            )


def refuse_unknown_batch(value: object, name: str) -> None:
    """Raise UsageError if a setting is 0 for the run's effective batch, which is unknown outside a run."""
    hints = hints_of(type(value))
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        if hints[field.name] == EffectiveBatch and not getattr(value, field.name):
            raise UsageError(f"{name}: the effective batch of your loop is unknown", fix=f"{field.name}=256")
