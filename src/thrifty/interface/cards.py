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

CardKind = Literal["technique", "objective", "preset", "design", "study"]


@dataclass(frozen=True, repr=False)
class NamedCard(PrintedResult):
    """Card and settings of an objective, a preset or a design; or the results of a study."""

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
        settings = [] if self.kind == "study" else ["Settings", *setting_lines(self.settings)]
        return lines(f"{self.name}  ({self.kind})\n", f"{self.card}\n", *notes, *settings)


def show(
    name: "str | type[Technique]", *, kind: CardKind | None = None, results: Sequence[Path] | None = None
) -> TechniqueProfile | NamedCard:
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
    if kind == "technique" or kind is None:
        try:
            return technique_profile(name, results or FOLDERS)
        except UsageError:
            if kind or not others:
                _refuse_other_kind(str(name))
                raise
    for each, names in others.items():
        if kind in (None, each):
            entry = catalog()[names][name]
            return _study_card(str(name), entry, results) if each == "study" else NamedCard(each, name, **entry)
    raise UsageError(f"there is no {kind} {name!r}", fix=did_you_mean(name, catalog()[_OTHERS[kind]]))


def _study_card(name: str, entry: dict[str, Any], results: Sequence[Path] | None) -> NamedCard:
    """Return the kept and finished results of a study, with the verdict on each expectation."""
    found: list[str] = []
    for past in past_studies(results or FOLDERS):
        if past.study == name:
            title = f"{past.held} of {past.expected} expectations hold ({past.cpu}): {shown_path(past.file)}"
            found += [title, *(f"  {sentence}" for sentence in past.sentences)]
    again = spelled(f"thrifty study {name}", f'thrifty.study("{name}")')
    return NamedCard("study", name, entry["about"], "\n".join([entry["about"], "", *found]), f"Repeat by: {again}", ())


def _refuse_other_kind(name: str) -> None:
    """Raise UsageError for a recipe, which has no card."""
    if name in catalog()["recipes"]:
        from thrifty.recipes import RECIPES  # imports torch

        has_data = bool(RECIPES[name]().data.source)
        command = f"thrifty explain {name}" + ("" if has_data else " --data my.txt")
        call = f'thrifty.explain(thrifty.recipe(recipe="{name}"' + ("))" if has_data else ', data="my.txt"))')
        raise UsageError(f"{name!r} is a recipe, which has no card", fix=spelled(command, call))


_OTHERS: dict[CardKind, Kind] = {
    "objective": "objectives", "preset": "presets", "design": "designs", "study": "studies",
}  # fmt: skip
"""List of the names of each kind of card, except techniques."""
