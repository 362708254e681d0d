"""`show`: cards of techniques, objectives, model presets and accelerator designs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from rich.console import RenderableType

from thrifty.core.card import read_card
from thrifty.core.errors import UsageError, did_you_mean, refuse_unknown, spelled
from thrifty.experiments.past_results import FOLDERS, past_studies, shown_path
from thrifty.interface.catalog import Kind, catalog
from thrifty.interface.technique_profiles import TechniqueProfile, setting_lines, technique_profile
from thrifty.reporting.printed_result import PrintedResult, lines

if TYPE_CHECKING:
    from thrifty.core.technique import Technique

CardKind = Literal["technique", "objective", "preset", "design"]


@dataclass(frozen=True, repr=False)
class NamedCard(PrintedResult):
    """Card and settings of an objective, a preset or a design."""

    kind: CardKind
    name: str
    about: str
    """One line."""
    card: str
    notes: str
    """Notes on the implementation, or the sizes of a preset."""
    settings: tuple[dict[str, Any], ...]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), **asdict(read_card(self.card))}

    def __rich__(self) -> RenderableType:
        notes = [f"{self.notes}\n"] if self.notes else []
        return lines(
            f"{self.name}  ({self.kind})\n", f"{self.card}\n", *notes, "Settings", *setting_lines(self.settings)
        )


@dataclass(frozen=True, repr=False)
class StudyCard(PrintedResult):
    """Results of a study: each kept or finished run with its expectations."""

    name: str
    about: str
    results: tuple[tuple[str, tuple[str, ...]], ...]
    """One line per result, with the verdict on each expectation."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __rich__(self) -> RenderableType:
        results = [line for title, sentences in self.results for line in (title, *(f"  {each}" for each in sentences))]
        again = spelled(f"thrifty study {self.name}", f'thrifty.study("{self.name}")')
        return lines(f"{self.name}  (study)\n", f"{self.about}\n", *(results or ["no result"]), f"\nrepeat by: {again}")


def show(
    name: "str | type[Technique]", *, kind: CardKind | None = None, results: Sequence[Path] | None = None
) -> TechniqueProfile | NamedCard | StudyCard:
    """Return the card of a technique, an objective, a model preset or an accelerator design, or a study's results.

    The card of a technique includes its measured evidence from the folders `results`: by default ./results, ./runs and
    the results in the package. If a technique and a design have the same name, such as "a3", `kind` selects one. The
    default is the technique.

    Raises UsageError for an unknown name.

    Example::

        card = thrifty.show("lora")
        print(card, card.settings[0]["default"])
    """
    refuse_unknown("there is no card of kind", kind or "technique", get_args(CardKind))
    others = {each: names for each, names in _OTHERS.items() if name in catalog()[names]}
    if kind is None and not others and name in catalog()["studies"]:
        past = [each for each in past_studies(results or FOLDERS) if each.study == name]
        titles = [
            f"{each.held} of {each.expected} expectations hold ({each.cpu}): {shown_path(each.file)}" for each in past
        ]
        about = catalog()["studies"][name]["about"]
        return StudyCard(str(name), about, tuple(zip(titles, (each.sentences for each in past), strict=True)))
    if kind == "technique" or kind is None:
        try:
            return technique_profile(name, results or FOLDERS)
        except UsageError:
            if kind or not others:
                _refuse_other_kind(str(name))
                raise
    for each, names in others.items():
        if kind in (None, each):
            return NamedCard(each, name, **catalog()[names][name])
    raise UsageError(f"there is no {kind} {name!r}", fix=did_you_mean(name, catalog()[_OTHERS[kind]]))


def _refuse_other_kind(name: str) -> None:
    """Raise UsageError for a recipe, which has no card."""
    if name in catalog()["recipes"]:
        from thrifty.recipes import RECIPES  # imports torch

        has_data = bool(RECIPES[name]().data.source)
        command = f"thrifty explain {name}" + ("" if has_data else " --data my.txt")
        call = f'thrifty.explain(thrifty.recipe(recipe="{name}"' + ("))" if has_data else ', data="my.txt"))')
        raise UsageError(f"{name!r} is a recipe, which has no card", fix=spelled(command, call))


_OTHERS: dict[CardKind, Kind] = {"objective": "objectives", "preset": "presets", "design": "designs"}
"""List of the names of each kind of card, except techniques."""
