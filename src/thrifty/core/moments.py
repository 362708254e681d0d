"""Moments of a run: a float is a fraction of the whole run, an int a number of steps.

`warmup: Moment = 0.05` means the first twentieth of the run, however long it turns out to be, and `warmup = 200` means
200 steps. Composing a run turns every moment of every technique into steps, so seams only ever see integers.
"""

import dataclasses
import typing
from typing import Annotated, Any, TypeVar

Moment = Annotated[int | float, "moment of a run"]
T = TypeVar("T")


def in_steps(moment: int | float, steps: int) -> int:
    return moment if isinstance(moment, int) else round(moment * steps)


def resolve_moments(value: T, steps: int) -> T:
    """A copy of a dataclass with each field annotated `Moment` (or a tuple of them) in steps of a run of `steps`."""
    hints = typing.get_type_hints(type(value), include_extras=True)
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        current = getattr(value, field.name)
        if hints[field.name] == Moment:
            changes[field.name] = in_steps(current, steps)
        elif hints[field.name] == tuple[Moment, ...]:
            changes[field.name] = tuple(in_steps(moment, steps) for moment in current)
    return dataclasses.replace(value, **changes)  # type: ignore[type-var]
