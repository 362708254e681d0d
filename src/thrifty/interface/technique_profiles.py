"""Card of a technique with its settings and its measured evidence."""

import ast
import dataclasses
import inspect
import json
import sys
import typing
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from thrifty import techniques
from thrifty.core.card import read_card
from thrifty.core.run_relative_settings import is_moment
from thrifty.core.setting_bounds import hints_of
from thrifty.experiments.evidence import ASPECTS, Evidence, evidence_by_technique
from thrifty.interface.catalog import catalog
from thrifty.reporting.printed_result import PrintedResult, lines

if TYPE_CHECKING:
    from thrifty.core.technique import Technique

_SEAMS = ("model", "batches", "objective", "backward", "update", "changes", "footprint", "holds", "finish")


@dataclass(frozen=True, repr=False)
class TechniqueProfile(PrintedResult):
    """A technique: its card, its settings and its measured evidence."""

    name: str
    stage: str
    numerics: str
    """Effect on numerical values: "exact", "rounding" or "different"."""
    claims: tuple[str, ...]
    seams: tuple[str, ...]
    card: str
    notes: str
    """Notes on the implementation."""
    settings: tuple[dict[str, Any], ...]
    """"name", "type" (in words) and "default" of each setting."""
    evidence: Evidence = field(default_factory=Evidence)

    def as_dict(self) -> dict[str, Any]:
        derived = {"verdicts": self.verdicts(), "in_words": self.evidence.in_words(), "goal": goal_of(self.name)}
        data = {**asdict(self), **derived, **asdict(read_card(self.card))}
        text = json.dumps(data, default=lambda value: sorted(value) if isinstance(value, frozenset) else str(value))
        return json.loads(text, parse_constant=lambda word: str(float(word)))  # JSON has no infinity

    def verdicts(self) -> dict[str, str]:
        """Return the verdict on each aspect. The technique declares its exactness, and `thrifty check` tests it."""
        return {**self.evidence.verdicts(), "exactness": self.numerics}

    def chip(self) -> str:
        """Return one line with all verdicts and the machines of the measurements."""
        verdicts = self.verdicts()
        shown = [f"{aspect} {verdicts.get(aspect, 'not measured')}" for aspect in ASPECTS if aspect != "quality"]
        quality = [f"quality {verdicts['quality']}"] if "quality" in verdicts else []
        return " | ".join([*shown, *quality, f"measured on {'; '.join(self.evidence.machines()) or 'no machine'}"])

    def __rich__(self) -> RenderableType:
        start = read_card(self.card).start or f"{self.name}{self._example()}"
        evidence = self.evidence.in_words()
        comparison = f"thrifty compare RECIPE --variant '--with {self.name}'"
        return lines(
            f"{self.name}  (stage {self.stage}, numerics {self.numerics})\n",
            f"{self.card}\n",
            *([f"{self.notes}\n"] if self.notes else []),
            "Settings",
            *setting_lines(self.settings),
            f"\nCommand line: --with {start}",
            f"\nEvidence: {self.chip()}",
            *(f"  {line}" for line in evidence or [f"not measured yet; measure with: {comparison}"]),
        )

    def _example(self) -> str:
        simple = [each for each in self.settings if type(each["default"]) in (int, float)]
        return f":{simple[0]['name']}={json.dumps(simple[0]['default'])}" if simple else ""


def technique_profile(technique: "str | type[Technique]", results: Sequence[Path]) -> TechniqueProfile:
    """Return the card of a technique with its evidence from the folders `results`."""
    profile = profile_named(technique) if isinstance(technique, str) else profile_of(technique)
    return replace(profile, evidence=evidence_by_technique(results).get(profile.name, Evidence()))


def profile_named(name: str) -> TechniqueProfile:
    """Return the card of a technique without evidence. Only a technique that the catalog lacks is imported."""
    entry = catalog()["techniques"].get(techniques.full_name(name))
    return TechniqueProfile(**entry) if entry else profile_of(techniques.find(name))


@cache
def goal_of(name: str) -> str:
    """Return the goal of a technique: the first line of the docstring of its group."""
    group = name.rpartition(".")[0]
    package = Path(techniques.__file__).parent / group / "__init__.py"
    docstring = ast.get_docstring(ast.parse(package.read_bytes())) if group and package.is_file() else ""
    return (docstring or group or "Compilation").partition("\n")[0]


def profile_of(kind: "type[Technique]") -> TechniqueProfile:
    """Return the card of a technique without evidence."""
    return TechniqueProfile(
        name=kind.name,
        stage=kind.stage.label,
        numerics=kind.numerics.value,
        claims=tuple(sorted(kind.claims)),
        seams=tuple(seam for seam in _SEAMS if seam in vars(kind)),
        card=inspect.cleandoc(sys.modules[kind.__module__].__doc__ or ""),
        notes=_notes(kind),
        settings=settings_of(kind),
    )


def settings_of(kind: type) -> tuple[dict[str, Any], ...]:
    """Return "name", "type" (in words) and "default" of each setting of a technique or an objective."""
    hints = hints_of(kind)
    return tuple(
        {"name": field.name, "type": _type_name(hints[field.name]), "default": field.default}
        for field in dataclasses.fields(kind)
    )


def setting_lines(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Return one printed line per setting."""
    return [f"  {each['name']} = {each['default']!r}  ({each['type']})" for each in settings] or ["  none"]


def _notes(kind: "type[Technique]") -> str:
    """Return the docstring of the class. Return "" if it is only the signature that dataclasses generate."""
    docstring = vars(kind).get("__doc__") or ""
    return "" if docstring.startswith(f"{kind.__name__}(") else inspect.cleandoc(docstring)


def _type_name(kind: Any) -> str:
    """Return a type in words: "int, at least 1", "erk or uniform", "a fraction of the run, or a number of steps"."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_moment(kind):
        return "a fraction of the run, or a number of steps"
    if origin is typing.Annotated:
        return f"{_type_name(arguments[0])}, {arguments[1]}"
    if origin is typing.Literal:
        return " or ".join(map(str, arguments))
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    return getattr(kind, "__name__", str(kind))
