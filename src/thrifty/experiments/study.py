"""Study: an experiment of many small runs that yields a table, plots, and verdicts on expectations.

A study is the product of its cases and its seeds. `measure` returns the values of one run, a *cell*. The other fields
define how cells are aggregated, plotted and judged.
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
"""Keyword arguments of `measure`, as plain JSON values."""
Numbers = Mapping[str, float]
"""Measured values of one run. Infinity means "never": a diverged loss, or a target that was not reached."""
Cells = Mapping[str, Numbers]
"""Measured values by case label: those of one seed, or means over seeds."""


@dataclass(frozen=True)
class MeasuredQuantity:
    """One quantity that a study measures."""

    about: str
    """Description of the quantity, with its unit."""
    of_machine: bool = False
    """True if the value depends on the machine, such as a time. It is shown but never compared."""


@dataclass(frozen=True)
class StudyPlot:
    """A plot of one quantity against a setting, another quantity, or the cases; one line per value of the setting
    `by`."""

    id: str
    title: str
    y: str
    x: str = "case"
    by: str = ""
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, kw_only=True)
class Study:
    """An experiment, defined by its measure, cases, quantities, expectations and plots.

    Raise UsageError if these do not fit together.
    """

    name: str = ""
    """Name of the study; by default the module name of `measure`. `about` is then the first paragraph of its
    docstring."""
    about: str = ""
    measure: Callable[..., Numbers]
    """Top-level function of a module, called as measure(seed=…, **settings) in separate processes."""
    cases: Mapping[str, Settings]
    quantities: Mapping[str, MeasuredQuantity]
    seeds: int = 3
    """Number of seeds, counted from 0."""
    derive: Callable[[Cells], Cells] | None = None
    """Function that computes additional rows, with labels of their own, from all cases of a seed, such as the best
    rate."""
    expect: Mapping[str, Callable[[Cells], bool]] = field(default_factory=dict)
    """Expected statements about the outcome, each with its condition. A condition is checked on the means and on each
    seed. A statement that does not hold is a result too. If the condition raises KeyError, because a case was not
    measured, the verdict is "open"."""
    plots: Sequence[StudyPlot] = ()
    minutes: float = 1.0
    """Approximate duration on two cores, in minutes."""

    def __post_init__(self) -> None:
        docstring = sys.modules[self.measure.__module__].__doc__ or ""
        object.__setattr__(self, "name", self.name or self.measure.__module__.rpartition(".")[2])
        object.__setattr__(self, "about", self.about or " ".join(docstring.partition("\n\n")[0].split()))
        if self.seeds < 1 or not self.cases:
            raise UsageError(
                f"{self.name}: {len(self.cases)} cases, {self.seeds} seeds", fix="define at least 1 of each"
            )
        if not self.measure.__qualname__.isidentifier() or self.measure.__module__ == "__main__":
            raise UsageError(
                f"{self.name}: another process cannot import {self.measured_by!r}",
                fix="define the measure at the top level of a file that can be imported",
            )
        for label, settings in self.cases.items():
            try:
                inspect.signature(self.measure).bind(seed=0, **settings)
                same = json.loads(json.dumps(dict(settings))) == dict(settings)
            except TypeError as error:
                raise UsageError(f"{self.name}, case {label!r}: {error}") from None
            if not same:
                raise UsageError(
                    f"{self.name}, case {label!r}: its settings are not plain JSON values",
                    fix="use numbers, strings, lists",
                )

    @property
    def measured_by(self) -> str:
        """The measure as `module:function`, so that another process can import it."""
        return f"{self.measure.__module__}:{self.measure.__qualname__}"

    def definition(self) -> dict[str, Any]:
        """Return the part of the study that determines a cell's values: measure, hash of its source file, and cases."""
        source = Path(inspect.getfile(self.measure)).read_bytes()
        cases = {label: dict(settings) for label, settings in self.cases.items()}
        return {"measure": self.measured_by, "source": f"sha256 {hashlib.sha256(source).hexdigest()}", "cases": cases}


def grid(**factors: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Return every combination of factor levels as cases: grid(p=(2, 4), depth=(1, 2)) has "p 2, depth 1"."""
    cases = {}
    for levels in itertools.product(*factors.values()):
        settings = dict(zip(factors, levels, strict=True))
        cases[", ".join(f"{name} {level_text(level)}" for name, level in settings.items())] = settings
    return cases


def level_text(level: Any) -> str:
    """Format a level of a factor."""
    return f"{level:g}" if isinstance(level, int | float) and not isinstance(level, bool) else str(level)
