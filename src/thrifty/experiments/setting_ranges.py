"""Search space of a sweep: values of recipe settings, by path.

8,16,32             one of these values
1e-4..1e-2:log      a value of this range, uniform on a logarithmic scale
0..0.3              a value of this range; two whole numbers are a range of whole numbers
"""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from thrifty import techniques
from thrifty.core.errors import UsageError
from thrifty.core.recipe import Recipe
from thrifty.recipes.recipe_layers import RecipeLayers, toml_value

TRIALS = 9
"""Number of trials of a space with a range: with a reduction factor of 3, rungs of 9, 3 and 1 trials."""
DIGITS = 3
"""Significant digits of sampled numbers, so that they can be pasted."""
Settings = Mapping[str, Any]
"""Values by path in the recipe."""


@dataclass(frozen=True)
class SettingRange:
    """Range of numbers, including both ends."""

    low: int | float
    high: int | float
    is_log: bool = False

    def at(self, place: float) -> int | float:
        """Return the number at a place from 0 to 1, rounded to `DIGITS` digits, or to a whole number if both ends are
        whole."""
        low, high = (math.log(end) if self.is_log else end for end in (self.low, self.high))
        value = low + (high - low) * place
        value = math.exp(value) if self.is_log else value
        is_whole = isinstance(self.low, int) and isinstance(self.high, int)
        rounded = round(value) if is_whole else float(f"{value:.{DIGITS}g}")
        return min(max(rounded, self.low), self.high)


Space = Mapping[str, SettingRange | tuple[Any, ...]]
"""Range or values of each setting, by path in the recipe."""


def read_space(over: Mapping[str, str | Sequence[Any]], recipe: Recipe) -> Space:
    """Return the search space. Raise UsageError for values that cannot be read, for a technique that the recipe does
    not use, and for a space of fewer than two points."""
    if not over:
        fix = "--over optimizers.adamw.lr=1e-4..1e-2:log --over data.batch=8,16,32"
        raise UsageError("the sweep has no setting to vary", fix=fix)
    space = {_setting_path(path, recipe): _read_values(path, values) for path, values in over.items()}
    if all(isinstance(values, tuple) and len(values) == 1 for values in space.values()):
        raise UsageError(
            f"--over {', '.join(over)}: the sweep has one point, since each setting has one value",
            fix="list different values, such as 8,16,32, or a range, such as 1e-4..1e-2:log",
        )
    return space


def sample_settings(space: Space, trials: int | None, seed: int) -> list[dict[str, Any]]:
    """Return the settings of each trial, all different.

    Without a range, the trials are the whole grid, or `trials` random points of it. With a range, they are a Latin
    hypercube (McKay, Beckman and Conover 1979): random points that cover each range and each list evenly. Points that
    are equal after rounding are one trial.
    """
    generator = random.Random(seed)
    choices = [values for values in space.values() if isinstance(values, tuple)]
    if len(choices) == len(space):
        grid = [dict(zip(space, point, strict=True)) for point in itertools.product(*choices)]
        places = range(len(grid)) if trials is None else generator.sample(range(len(grid)), min(trials, len(grid)))
        return [grid[place] for place in sorted(places)]
    count = trials or TRIALS
    columns = {
        path: [_value_at(values, place) for place in _places(count, generator)] for path, values in space.items()
    }
    points = [dict(zip(columns, point, strict=True)) for point in zip(*columns.values(), strict=True)]
    return list({repr(point): point for point in points}.values())


def _places(count: int, generator: random.Random) -> list[float]:
    """Return a random place in each of `count` equal parts of 0 to 1, in random order."""
    return [(part + generator.random()) / count for part in generator.sample(range(count), count)]


def _value_at(values: SettingRange | tuple[Any, ...], place: float) -> Any:
    return values.at(place) if isinstance(values, SettingRange) else values[int(place * len(values))]


def with_settings(recipe: Recipe, settings: Settings) -> Recipe:
    """Return the recipe with the settings of a trial. Raise UsageError for an unknown path or a wrong value."""
    layers = RecipeLayers.above("recipe", recipe)
    for path, value in settings.items():
        layers.assign("--over", path, value)
    return layers.recipe()


def _setting_path(path: str, recipe: Recipe) -> str:
    """Return the path in the recipe: "adamw.lr" is techniques.optimizers.adamw.lr."""
    own = path.removeprefix("techniques.")
    name, _, setting = own.rpartition(".")
    if own == path and path.partition(".")[0] in {field.name for field in fields(Recipe)}:
        return path
    if not name:
        fix = "--over adamw.lr=1e-4..1e-2:log" if path in ("lr", "learning_rate") else "--over data.batch=8,16,32"
        raise UsageError(f"there is no setting {path!r}", fix)
    full = techniques.full_name(name)
    if full not in {technique.name for technique in recipe.techniques}:
        raise UsageError(f"--over {path!r}: the recipe does not use {full!r}", fix=f"add --with {full}")
    return f"techniques.{full}.{setting}"


def _read_values(path: str, values: str | Sequence[Any]) -> SettingRange | tuple[Any, ...]:
    if not isinstance(values, str):
        choices = tuple(values)
    elif ".." in values:
        return _read_range(path, values)
    else:
        choices = tuple(toml_value(text.strip()) for text in values.split(",") if text.strip())
    if len({repr(choice) for choice in choices}) < max(len(choices), 1):
        raise UsageError(f"--over {path!r} has the values {values!r}", fix="list different values, such as 8,16,32")
    return choices


def _read_range(path: str, text: str) -> SettingRange:
    ends, _, scale = text.partition(":")
    low, high = (toml_value(end.strip()) for end in ends.split("..", 1))
    is_number = all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high))
    if not is_number or scale not in ("", "log", "linear") or not low < high or (scale == "log" and low <= 0):
        what = f"--over {path}={text!r} is not a range LOW..HIGH, LOW..HIGH:log or LOW..HIGH:linear"
        is_text = any(isinstance(end, str) for end in (low, high))
        raise UsageError(what, fix=f"--over {path}={f'{low},{high}' if is_text else '1e-4..1e-2:log'}")
    return SettingRange(low, high, scale == "log")
