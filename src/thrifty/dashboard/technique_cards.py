"""Technique cards of the board: sections of a technique's card, with the technique's settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thrifty.core.card import read_card
from thrifty.reporting.run_tables import TextTable


@dataclass(frozen=True)
class TechniqueCard:
    name: str
    stage: str
    numerics: str
    title: str
    """Effect of the technique in one clause."""
    sections: Mapping[str, str]
    """Text of each section of the card, and of "Implementation"."""
    settings: TextTable

    @property
    def group(self) -> str:
        return self.name.rpartition(".")[0].replace("_", " ") or "on their own"


def card_from(profile: Mapping[str, Any]) -> TechniqueCard:
    """Return the card for a technique's profile, in the form that `thrifty show --json` prints."""
    card = read_card(profile["card"])
    rows = [(each["name"], str(each["default"]), each["type"]) for each in profile["settings"]]
    more = {"More": card.rest, "Notes": profile.get("notes", "")}
    return TechniqueCard(
        name=profile["name"],
        stage=profile["stage"].replace("_", " "),
        numerics=profile["numerics"],
        title=card.effect[:1].upper() + card.effect[1:],
        sections={head: text for head, text in {**card.sections, **more}.items() if text},
        settings=TextTable("Settings", ("Setting", "Default", "Type"), rows),
    )
