"""Bounds of settings, declared in the annotation of the setting: `parts: Positive = 4`."""

import re
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, Literal

from thrifty.core.errors import UsageError, did_you_mean, spelled


@dataclass(frozen=True)
class SettingBound:
    """Bounds of a number, or of each element of a tuple; `above` and `below` exclude the bound itself."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def admits(self, value: float | None) -> bool:
        return value is None or (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        parts = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        return " and ".join(f"{word} {limit:g}" for word, limit in parts.items() if limit is not None)


Positive = Annotated[int, SettingBound(least=1)]
Natural = Annotated[int, SettingBound(least=0)]
Fraction = Annotated[float, SettingBound(above=0, most=1)]
Probability = Annotated[float, SettingBound(least=0, most=1)]
Rate = Annotated[float, SettingBound(least=0)]
LEAST_EPSILON = SettingBound(least=1e-20)
"""Bound for eps in a denominator with a root. The square of a smaller eps underflows, so zero gradients give 0 / 0."""
Epsilon = Annotated[float, LEAST_EPSILON]
Betas = Annotated[tuple[float, float], SettingBound(least=0, below=1)]
LARGEST_INTEGER = 2**63 - 1


@cache
def hints_of(kind: type) -> Mapping[str, Any]:
    """Return the annotations of a dataclass's fields, with bounds. The result is cached, because computing it takes
    longer than creating an instance."""
    return typing.get_type_hints(kind, include_extras=True)


def check_bounds(value: Any, name: str) -> None:
    """Raise UsageError for the first field of a dataclass whose value is not allowed. The value must be within the
    bound, must be a word of the Literal, and must be possible in a recipe (see `check_plain`). A number may be infinite
    or NaN only if the field's default is infinite or NaN."""
    hints = hints_of(type(value))
    for field in fields(value):
        usual = field.default if isinstance(field.default, tuple) else (field.default,)
        strange = {str(abs(number)) for number in usual if isinstance(number, float)}
        refused = {"nan"} - strange if strange & {"inf", "nan"} else {"inf", "nan"}
        check_plain(getattr(value, field.name), f"{name}: {field.name}", refused)
        words = typing.get_args(hints[field.name]) if typing.get_origin(hints[field.name]) is Literal else ()
        if words and getattr(value, field.name) not in words:
            setting = getattr(value, field.name)
            raise UsageError(f"{name}: {field.name} is {setting!r}", fix=did_you_mean(str(setting), words))
        for bound in _notes(hints[field.name]):
            setting = getattr(value, field.name)
            numbers = setting if isinstance(setting, tuple) else (setting,)
            if isinstance(bound, SettingBound) and not all(map(bound.admits, numbers)):
                raise UsageError(f"{name}: {field.name} is {setting!r}", fix=f"{field.name} must be {bound}")


def _notes(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__metadata__", ())


def check_plain(value: Any, name: str, refused: Collection[str] = ()) -> None:
    """Raise UsageError for a value that no recipe can contain. Such values are integers beyond 64 bits, text that is
    not Unicode or has control characters, and floats named in `refused` ("inf", "nan"). Lists and tables are checked
    recursively."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_plain(key, f"{name}: a key")
            check_plain(item, f"{name}.{key}", refused)
    elif isinstance(value, list | tuple):
        for item in value:
            check_plain(item, name, refused)
    elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise UsageError(f"{name} has {value.bit_length()} bits", fix=f"use a number of at most {LARGEST_INTEGER}")
    elif isinstance(value, float) and str(abs(value)) in refused:
        raise UsageError(f"{name} is {value}", fix="use a finite number")
    elif isinstance(value, str) and (strange := _STRANGE.search(value)):
        raise UsageError(
            f"{name} has the character {strange[0]!r}: {value[:80]!r}", fix="remove the character; or rename the file"
        )


_STRANGE = re.compile(r"[^\t\n\r -~\xa0-\ud7ff\ue000-\U0010ffff]")
"""Control characters, and bytes from a command line or file name that are not Unicode text."""


def check_pattern(value: Any, name: str, field: str) -> None:
    """Raise UsageError if a field that is matched against names is not a regular expression."""
    try:
        re.compile(getattr(value, field))
    except re.error as error:
        what = f"{name}: {field} is not a regular expression: {error}"
        raise UsageError(what, fix=rf"for instance {field} = '\.mlp\.'") from None


def set_pattern(technique: str, names: Sequence[str], others: Collection[str] = ()) -> str:
    """Return a fix that sets the setting `where` of a technique to a pattern that matches the parameters or layers
    `names`, but not `others`: the modules at the top of the model, or the whole names."""
    if not names:
        return f"--without {technique}"
    pattern = f"^({'|'.join(map(re.escape, sorted({name.partition('.')[0] for name in names})))})"
    if any(re.search(pattern, other) for other in others):
        pattern = f"^({'|'.join(map(re.escape, names))})$"
    setting = f"techniques.{technique}.where"
    return spelled(f"--set '{setting}={pattern}'", f'settings={{"{setting}": r"{pattern}"}}')
