"""Training examples as cards: a picture or a text, and what is known of it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thrifty.core.secret_redaction import redact_text
from thrifty.reporting.number_format import percent, significant, whole
from thrifty.reporting.run_record import mapping, mappings, number
from thrifty.reporting.run_tables import TextTable

_PICTURE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/=]+")
LONGEST = 400
"""Characters of a text that are shown."""


@dataclass(frozen=True)
class ExampleCard:
    title: str
    picture: str = ""
    text: str = ""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class CardRow:
    """Pictures that belong side by side."""

    title: str
    pictures: tuple[tuple[str, str], ...]
    """What each is, and its address."""
    remark: str = ""


def card(example: Mapping[str, Any], title: str = "", remarks: tuple[str, ...] = ()) -> ExampleCard:
    """An example as `data.run_data.ExamplePreview` spells it; what cannot be a picture is none."""
    picture, text, file = (str(example.get(name) or "") for name in ("picture", "text", "file"))
    which = whole(number(example.get("number")))
    where = redact_text(file) if file else f"example {which}"
    return ExampleCard(
        title=title or redact_text(str(example.get("label") or "")) or f"example {which}",
        picture=picture if _PICTURE.fullmatch(picture) else "",
        text=redact_text(text[:LONGEST] + ("…" if len(text) > LONGEST else "")),
        remarks=(*remarks, where),
    )


def sentence(selection: Mapping[str, Any]) -> str:
    """How many examples are kept, in words."""
    kept, there = (whole(number(selection.get(name))) for name in ("kept", "examples"))
    return (
        f"{kept} of {there} training examples are kept. Of each kind those with the highest and the lowest scores are "
        "shown, where there are scores."
    )


def kept_by_label(selection: Mapping[str, Any]) -> TextTable:
    """How many examples of each label a run is trained on."""
    rows = []
    for row in selection.get("labels") or ():
        if isinstance(row, list) and len(row) == 3:
            label, there, kept = redact_text(str(row[0])), number(row[1]), number(row[2])
            share = percent(kept / there) if kept is not None and there else percent(None)
            rows.append((label, whole(there), whole(kept), share))
    return TextTable("Examples kept, by label", ("Label", "All", "Kept", "Share"), rows, frozenset((1, 2, 3)))


def groups(selection: Mapping[str, Any]) -> list[tuple[str, list[ExampleCard]]]:
    """The examples that a run's folder shows, by what became of them."""
    made = []
    for name, examples in mapping(selection.get("shown")).items():
        cards = [card(each, remarks=_scored(each)) for each in mappings(examples)]
        if cards:
            made.append((redact_text(str(name)), cards))
    return made


def seen(pictures: Mapping[str, Any]) -> str:
    """What the pictures of a run's predictions show, in words."""
    step, about = whole(number(pictures.get("step"))), redact_text(str(pictures.get("about") or ""))
    return f"{about} Held-out examples after step {step}.".strip()


def rows(pictures: Mapping[str, Any]) -> list[CardRow]:
    """The pictures of a run's predictions, those of an example in a row."""
    shown = pictures.get("shown")
    made = []
    for place, each in enumerate(shown if isinstance(shown, list) else (), start=1):
        images = [
            (redact_text(str(name)), str(address))
            for name, address in mapping(mapping(each).get("pictures")).items()
            if _PICTURE.fullmatch(str(address))
        ]
        if images:
            loss = number(each.get("loss"))
            made.append(CardRow(f"Example {place}", tuple(images), "" if loss is None else f"loss {significant(loss)}"))
    return made


def _scored(example: Mapping[str, Any]) -> tuple[str, ...]:
    score = number(example.get("score"))
    return () if score is None else (f"score {significant(score)}",)
