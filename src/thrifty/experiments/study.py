"""Study: an experiment of many small runs that yields a table, plots, and verdicts on expectations.

A study runs every case with every seed. `measure` returns the values of one run. One run is a *cell*. The other fields
of `Study` define how cells are aggregated, plotted and judged.
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
"""Measured values of one run. Infinity means "never": the loss diverged, or a target was not reached."""
Cells = Mapping[str, Numbers]
"""Measured values by case label, for one seed or as means over seeds."""


@dataclass(frozen=True)
class MeasuredQuantity:
    """Quantity that a study measures."""

    about: str
    """Description of the quantity, with its unit."""
    of_machine: bool = False
    """True if the value depends on the machine, such as a time. The value is shown but never compared."""


@dataclass(frozen=True)
class StudyPlot:
    """Plot of one quantity by a setting, by another quantity, or by case. There is one line for each value of the
    setting `by`.
    """

    id: str
    title: str
    y: str
    x: str = "case"
    by: str = ""
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, kw_only=True)
class Study:
    """Experiment, defined by its measure function, cases, quantities, expectations and plots.

    Raises UsageError if `measure` cannot be imported, or if the settings of a case do not match `measure`.
    """

    name: str = ""
    """Name of the study; by default the name of the module that defines `measure`. For the default name, `about` is the
    first paragraph of that module's docstring.
    """
    about: str = ""
    measure: Callable[..., Numbers]
    """Top-level function of a module. Separate processes call it as measure(seed=…, **settings)."""
    cases: Mapping[str, Settings]
    quantities: Mapping[str, MeasuredQuantity]
    seeds: int = 3
    """Number of seeds. Seeds start at 0."""
    derive: Callable[[Cells], Cells] | None = None
    """Function that computes additional rows with their own labels, such as the best learning rate. Its argument is all
    cells of one seed.
    """
    expect: Mapping[str, Callable[[Cells], bool]] = field(default_factory=dict)
    """Expected statements about the outcome, each with its condition. A condition is checked on the means and on each
    seed. A statement that does not hold is also a result. If the condition raises KeyError because a case was not
    measured, the verdict is "open".
    """
    plots: Sequence[StudyPlot] = ()
    minutes: float = 1.0
    """Approximate duration in minutes on two cores."""

    def __post_init__(self) -> None:
        docstring = sys.modules[self.measure.__module__].__doc__ or ""
        object.__setattr__(self, "name", self.name or self.measure.__module__.rpartition(".")[2])
        object.__setattr__(self, "about", self.about or " ".join(docstring.partition("\n\n")[0].split()))
        if self.seeds < 1 or not self.cases:
            raise UsageError(
                f"{self.name} has {len(self.cases)} cases and {self.seeds} seeds",
                fix="define at least 1 case and 1 seed",
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
                raise UsageError(
                    f"{self.name}, case {label!r}: {error}", fix="match the arguments of the measure"
                ) from None
            if not same:
                raise UsageError(
                    f"{self.name}, case {label!r}: its settings are not plain JSON values",
                    fix="use only numbers, strings and lists",
                )

    @property
    def measured_by(self) -> str:
        """Name of the measure as `module:function`. Another process imports the measure by this name."""
        return f"{self.measure.__module__}:{self.measure.__qualname__}"

    def definition(self) -> dict[str, Any]:
        """Return the values that determine the results of cells: the measure, the hash of its source file, and the
        cases.
        """
        source = Path(inspect.getfile(self.measure)).read_bytes()
        cases = {label: dict(settings) for label, settings in self.cases.items()}
        return {"measure": self.measured_by, "source": f"sha256 {hashlib.sha256(source).hexdigest()}", "cases": cases}


def grid(**factors: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Return every combination of factor levels as cases. For example, grid(p=(2, 4), depth=(1, 2)) contains "p 2,
    depth 1".
    """
    cases = {}
    for levels in itertools.product(*factors.values()):
        settings = dict(zip(factors, levels, strict=True))
        cases[", ".join(f"{name} {level_text(level)}" for name, level in settings.items())] = settings
    return cases


def level_text(level: Any) -> str:
    """Return a factor level as text."""
    return f"{level:g}" if isinstance(level, int | float) and not isinstance(level, bool) else str(level)
