"""Technique cards: what a technique's file says of itself."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thrifty.reporting.run_tables import TextTable

HEADS = ("Paper", "Promise", "Cost", "Does not", "Avoid", "Note", "Measured")


@dataclass(frozen=True)
class TechniqueCard:
    name: str
    stage: str
    numerics: str
    title: str
    """The first line of the card, without the name."""
    parts: Sequence[tuple[str, str]]
    """Heading and text: Paper, Promise, Cost, …; text without a heading comes under none."""
    settings: TextTable

    @property
    def group(self) -> str:
        return self.name.rpartition(".")[0].replace("_", " ") or "on their own"


def card_from(told: Mapping[str, Any]) -> TechniqueCard:
    """A card from name, stage, numerics, card and settings of a technique, as `thrifty show --json` tells them."""
    first, _, rest = told["card"].partition("\n")
    opened = first.partition(": ")[2].strip() or first.strip()
    rows = [(each["name"], str(each["default"]), each["type"]) for each in told["settings"]]
    return TechniqueCard(
        name=told["name"],
        stage=told["stage"].replace("_", " "),
        numerics=told["numerics"],
        title=opened[:1].upper() + opened[1:],
        parts=tuple(parts(rest)),
        settings=TextTable("Settings", ("Setting", "Default", "Type"), rows),
    )


def parts(text: str) -> list[tuple[str, str]]:
    """The lines of a card under their headings. A line that begins with a heading opens it, others go on with it, and
    an empty line ends it."""
    sections: list[tuple[str, list[str]]] = []
    is_open = False
    for line in text.split("\n"):
        opening = re.match(rf"({'|'.join(HEADS)})\s+(?=\S)", line)
        if opening:
            sections.append((opening[1], [line[opening.end() :].strip()]))
        elif line.strip() and is_open:
            sections[-1][1].append(line.strip())
        elif line.strip():
            sections.append(("", [line.strip()]))
        is_open = bool(line.strip())
    return [(head, " ".join(lines)) for head, lines in sections]
