"""`show`: cards of techniques, objectives, model presets and accelerator designs."""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from rich.console import RenderableType

from thrifty import techniques
from thrifty.core.errors import UsageError, did_you_mean, refuse_unknown
from thrifty.core.recipe import ObjectiveSettings
from thrifty.core.technique import Technique
from thrifty.experiments.past_results import FOLDERS
from thrifty.interface.technique_profiles import TechniqueProfile, setting_lines, settings_of, technique_profile
from thrifty.reporting.printed_result import PrintedResult, lines

CardKind = Literal["technique", "objective", "preset", "design"]


@dataclass(frozen=True, repr=False)
class NamedCard(PrintedResult):
    """Card and settings of an objective, a preset or a design."""

    kind: CardKind
    name: str
    card: str
    notes: str = ""
    """Notes on the implementation."""
    settings: tuple[dict[str, Any], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __rich__(self) -> RenderableType:
        notes = [f"{self.notes}\n"] if self.notes else []
        return lines(
            f"{self.name}  ({self.kind})\n", f"{self.card}\n", *notes, "Settings", *setting_lines(self.settings)
        )


def show(
    name: str | type[Technique], *, kind: CardKind | None = None, results: Sequence[Path] | None = None
) -> TechniqueProfile | NamedCard:
    """Return the card of a technique, an objective, a model preset or an accelerator design.

    The card of a technique includes its measured evidence from the folders `results`: by default ./results, ./runs and
    the results in the package. If a technique and a design have the same name, such as "a3", `kind` selects one. The
    default is the technique.

    Raises UsageError for an unknown name.

    Example::

        card = thrifty.show("lora")
        print(card, card.settings[0]["default"])
    """
    if kind in (None, "technique"):
        try:
            return technique_profile(techniques.find(name) if isinstance(name, str) else name, results or FOLDERS)
        except UsageError:
            if kind or not any(name in names() for names, _ in _CARDS.values()):
                raise
    for each, (names, card_of) in _CARDS.items():
        if kind in (None, each) and name in names():
            return card_of(name)
    refuse_unknown("there is no card of kind", kind, get_args(CardKind))
    raise UsageError(f"there is no {kind} {name!r}", fix=did_you_mean(name, _CARDS[kind][0]()))


def _objective(name: str) -> NamedCard:
    from thrifty.objectives import OBJECTIVES

    kind = OBJECTIVES[name]
    card = inspect.cleandoc(sys.modules[kind.__module__].__doc__ or "")
    in_recipe = {field.name for field in fields(ObjectiveSettings)}
    settings = tuple(each for each in settings_of(kind) if each["name"] in in_recipe)
    return NamedCard("objective", name, card, inspect.cleandoc(kind.__doc__ or ""), settings)


def _preset(name: str) -> NamedCard:
    """Return the card of a preset's model family. The code example uses the preset, and the settings are its sizes."""
    from thrifty.models.families import FAMILIES
    from thrifty.models.model_presets import PRESETS

    shape = PRESETS[name]
    card = re.sub(r'train\("[^"]+"', f'train("{name}"', inspect.cleandoc(FAMILIES[shape.style].__doc__ or ""))
    return NamedCard("preset", name, card, settings=tuple(_settings(vars(shape), "model.")))


def _design(name: str) -> NamedCard:
    """Return the card of an accelerator design, with the settings of the accelerator."""
    from thrifty.simulators.accelerator.accelerator_file import find_machine

    machine = find_machine(name)
    design = importlib.import_module(f"thrifty.simulators.accelerator.designs.{machine.design}")
    card = inspect.cleandoc(design.__doc__ or "")
    return NamedCard("design", name, card, machine.about, tuple(_settings(machine.settings)))


def _settings(values: Mapping[str, Any], prefix: str = "") -> list[dict[str, Any]]:
    return [
        {"name": f"{prefix}{name}", "type": type(value).__name__, "default": value}
        for name, value in values.items()
        if value is not None
    ]


def _names(module: str, registry: str) -> Sequence[str]:
    return list(getattr(importlib.import_module(f"thrifty.{module}"), registry))


def _machines() -> Sequence[str]:
    from thrifty.simulators.accelerator.accelerator_file import machine_names

    return machine_names()


_CARDS: Mapping[CardKind, tuple[Callable[[], Sequence[str]], Callable[[str], NamedCard]]] = {
    "objective": (lambda: _names("objectives", "OBJECTIVES"), _objective),
    "preset": (lambda: _names("models.model_presets", "PRESETS"), _preset),
    "design": (_machines, _design),
}
"""Functions that return the names and the card of each kind, except techniques."""
