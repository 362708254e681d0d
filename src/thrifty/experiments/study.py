"""A study: an experiment of many small runs whose outcome is a table, a plot, and statements that should hold.

A study is its cases times its seeds. `measure` gives the numbers of one run, a *cell*; everything else here says how
cells are put together, drawn and judged.
"""

import hashlib
import inspect
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thrifty.core.errors import UsageError

Settings = Mapping[str, Any]
"""What `measure` is called with, in plain JSON values."""
Numbers = Mapping[str, float]
"""What one run came to. Infinite stands for "never": a loss that diverged, a goal that was not reached."""
Cells = Mapping[str, Numbers]
"""Numbers by the label of their case: those of one seed, or means over seeds."""


@dataclass(frozen=True)
class MeasuredQuantity:
    """One of the numbers that a study measures."""

    about: str
    """What it is, with its unit."""
    of_machine: bool = False
    """A time, say: shown, but no two machines need agree on it."""


@dataclass(frozen=True)
class StudyPlot:
    """Numbers drawn against a setting, a number, or the cases themselves; one line per value of the setting `by`."""

    id: str
    title: str
    y: str
    x: str = "case"
    by: str = ""
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, kw_only=True)
class Study:
    """Raises UsageError where the parts do not fit together."""

    name: str = ""
    """The name of the measure's module unless given; `about` is then the first paragraph of its docstring."""
    about: str = ""
    measure: Callable[..., Numbers]
    """A function at the top level of a module: it is called as measure(seed=…, **settings) in processes of its own."""
    cases: Mapping[str, Settings]
    quantities: Mapping[str, MeasuredQuantity]
    seeds: int = 3
    """How many: seeds count from 0."""
    derive: Callable[[Cells], Cells] | None = None
    """What only all cases of a seed together show, such as the best rate: further rows, by their own labels."""
    expect: Mapping[str, Callable[[Cells], bool]] = field(default_factory=dict)
    """Statements about the outcome, each with its condition, which is checked for the means over seeds and for each
    seed alone. A statement that does not hold is a result too. KeyError for a case that was not measured leaves it
    open."""
    plots: Sequence[StudyPlot] = ()
    minutes: float = 1.0
    """About how long all of it takes on two cores."""

    def __post_init__(self) -> None:
        told = sys.modules[self.measure.__module__].__doc__ or ""
        object.__setattr__(self, "name", self.name or self.measure.__module__.rpartition(".")[2])
        object.__setattr__(self, "about", self.about or " ".join(told.partition("\n\n")[0].split()))
        if self.seeds < 1 or not self.cases:
            raise UsageError(f"{self.name}: {len(self.cases)} cases, {self.seeds} seeds", fix="give at least 1 of each")
        if not self.measure.__qualname__.isidentifier() or self.measure.__module__ == "__main__":
            raise UsageError(
                f"{self.name}: another process cannot find {self.measured_by}",
                fix="define the measure at the top level of a file that can be imported",
            )
        for label, settings in self.cases.items():
            try:
                inspect.signature(self.measure).bind(seed=0, **settings)
                same = json.loads(json.dumps(dict(settings))) == dict(settings)
            except TypeError as error:
                raise UsageError(f"{self.name}, case {label!r}: {error}") from None
            if not same:
                raise UsageError(f"{self.name}, case {label!r}: its settings are not plain JSON values")

    @property
    def measured_by(self) -> str:
        """The measure as `module:function`, by which another process finds it."""
        return f"{self.measure.__module__}:{self.measure.__qualname__}"

    def definition(self) -> dict[str, Any]:
        """What decides the numbers of a cell, as far as the study's own file goes."""
        source = Path(inspect.getfile(self.measure)).read_bytes()
        cases = {label: dict(settings) for label, settings in self.cases.items()}
        return {"measure": self.measured_by, "source": f"sha256 {hashlib.sha256(source).hexdigest()}", "cases": cases}


def grid(**factors: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Every combination of the levels of some factors, as cases: grid(p=(2, 4), depth=(1, 2)) has "p 2, depth 1"."""
    cases = {}
    for levels in itertools.product(*factors.values()):
        settings = dict(zip(factors, levels, strict=True))
        cases[", ".join(f"{name} {level_text(level)}" for name, level in settings.items())] = settings
    return cases


def level_text(level: Any) -> str:
    """A level of a factor in words."""
    return f"{level:g}" if isinstance(level, int | float) and not isinstance(level, bool) else str(level)
