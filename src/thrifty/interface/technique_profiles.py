"""`show`: the card of a technique, and what was measured of it."""

import dataclasses
import inspect
import json
import sys
import typing
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from thrifty import techniques
from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.core.setting_bounds import hints_of
from thrifty.core.technique import Technique
from thrifty.experiments.past_results import FOLDERS, PastComparison, PastStudy, evidence, study_results
from thrifty.reporting.printed_result import PrintedResult, lines

_SEAMS = ("model", "batches", "objective", "backward", "update", "changes", "footprint", "holds", "finish")


@dataclass(frozen=True, repr=False)
class TechniqueProfile(PrintedResult):
    """A technique: its text, its settings, and what comparisons and studies measured of it."""

    name: str
    stage: str
    numerics: str
    claims: tuple[str, ...]
    seams: tuple[str, ...]
    card: str
    settings: tuple[dict[str, Any], ...]
    """The "name" of each setting, its "type" in words and its "default"."""
    comparisons: tuple[PastComparison, ...] = ()
    studies: tuple[PastStudy, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def measured(self) -> list[str]:
        """Return what was measured, a sentence for each comparison and study."""
        return [result.in_words() for result in (*self.comparisons, *self.studies)]

    def __rich__(self) -> RenderableType:
        settings = [f"  {each['name']} = {each['default']!r}  ({each['type']})" for each in self.settings]
        measured = self.measured()
        comparison = f"thrifty compare RECIPE --variant '--with {self.name}'"
        return lines(
            f"{self.name}  (stage {self.stage}, numerics {self.numerics})\n",
            f"{self.card}\n",
            *(settings or ["  no settings"]),
            f"\nuse it: --with {self.name}{self._example()}",
            "\nmeasured" if measured else f"\nnothing measured yet: {comparison}",
            *(f"  {line}" for line in measured),
        )

    def _example(self) -> str:
        simple = [each for each in self.settings if type(each["default"]) in (int, float)]
        return f":{simple[0]['name']}={json.dumps(simple[0]['default'])}" if simple else ""


def show(technique: str | type[Technique], *, results: Sequence[Path] = FOLDERS) -> TechniqueProfile:
    """Return the card of a technique: what it does, promises and costs, its settings, and what was measured of it in
    comparisons and studies below the folders `results`.

    Raises UsageError for an unknown name.

    Example::

        card = thrifty.show("lora")
        print(card, card.settings[0]["default"])
    """
    profile = profile_of(techniques.find(technique) if isinstance(technique, str) else technique)
    compared = tuple(each for each in evidence(results) if each.technique == profile.name)
    return replace(profile, comparisons=compared, studies=tuple(study_results(profile.name, results)))


def profile_of(kind: type[Technique]) -> TechniqueProfile:
    """Return the card of a technique without what was measured of it."""
    hints = hints_of(kind)
    return TechniqueProfile(
        name=kind.name,
        stage=kind.stage.label,
        numerics=kind.numerics.value,
        claims=tuple(sorted(kind.claims)),
        seams=tuple(seam for seam in _SEAMS if seam in vars(kind)),
        card=inspect.cleandoc(sys.modules[kind.__module__].__doc__ or ""),
        settings=tuple(
            {"name": field.name, "type": _type_name(hints[field.name]), "default": field.default}
            for field in dataclasses.fields(kind)
        ),
    )


def _type_name(kind: Any) -> str:
    """Return a type in words: `int, at least 1`, `erk or uniform`, `a fraction of the run, or a number of steps`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind == StepOrFraction:
        return "a fraction of the run, or a number of steps"
    if origin is typing.Annotated:
        return f"{_type_name(arguments[0])}, {arguments[1]}"
    if origin is typing.Literal:
        return " or ".join(map(str, arguments))
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    return getattr(kind, "__name__", str(kind))
